"""Forced alignment and words, by hand."""

import pytest
import torch

from speech_mt.decoding.alignment import Span, Word, forced_alignment, word_spans
from speech_mt.errors import InputError


def frames(symbols, vocabulary=5):
    """(frames, vocabulary): each frame all but certain of its symbol."""
    return torch.full((len(symbols), vocabulary), -9.0).scatter(1, torch.tensor(symbols)[:, None], -0.001)


def test_spans_are_the_frames_of_each_symbol():
    spans = forced_alignment(frames([0, 2, 2, 0, 2, 3, 0]), torch.tensor([2, 2, 3]), blank=0)
    assert [(span.start, span.end) for span in spans] == [(1, 3), (4, 5), (5, 6)]
    assert spans[0].score == pytest.approx(-0.001)


def test_a_transcript_that_was_not_heard_is_aligned_all_the_same():
    (span,) = forced_alignment(frames([2, 2]), torch.tensor([4]), blank=0)
    assert 0 <= span.start < span.end <= 2


def test_frames_of_a_batch_align():
    """A slice of a batch in time-first order, as models give it, is not contiguous."""
    batch = torch.stack([frames([0, 2]), frames([3, 0])]).transpose(0, 1).contiguous().transpose(0, 1)
    assert [(span.start, span.end) for span in forced_alignment(batch[1], torch.tensor([3]), blank=0)] == [(0, 1)]


def test_no_symbols_no_spans():
    assert forced_alignment(frames([0, 0]), torch.tensor([], dtype=torch.int64), blank=0) == []


def test_too_few_frames_are_refused():
    with pytest.raises(InputError, match="3 frames are too few for 3 symbols: CTC needs 4"):
        forced_alignment(frames([2, 2, 3]), torch.tensor([2, 2, 3]), blank=0)


def spans(count):
    return [Span(2 * i, 2 * i + 1, 0.0) for i in range(count)]


@pytest.mark.parametrize(
    ("symbols", "boundary", "words"),
    [
        (list("ab|c"), "|", [Word("ab", 0, 3), Word("c", 6, 7)]),
        (list("|a||b|"), "|", [Word("a", 2, 3), Word("b", 8, 9)]),
        (["▁a", "b", "▁c"], "▁", [Word("ab", 0, 3), Word("c", 4, 5)]),
        (["▁", "a", "▁", "b"], "▁", [Word("a", 2, 3), Word("b", 6, 7)]),
        (["▁a▁b", "c"], "▁", [Word("a", 0, 1), Word("bc", 0, 3)]),
        ([], "|", []),
    ],
)
def test_symbols_join_to_words_at_boundaries(symbols, boundary, words):
    assert word_spans(spans(len(symbols)), symbols, boundary) == words
