"""Prefix beam search against a sum over all alignments, written out."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speech_mt.decoding.ctc_greedy import best_path
from speech_mt.decoding.ctc_prefix_beam import PrefixBeamSearch
from speech_mt.decoding.word_language_model import Judged

BLANK = 0


def collapse(path):
    return tuple(symbol for symbol, _ in itertools.groupby(path) if symbol != BLANK)


def all_transcripts(log_probs):
    """ln p of every transcript: every path through the frames, added up."""
    frames, symbols = log_probs.shape
    found = defaultdict(lambda: -math.inf)
    for path in itertools.product(range(symbols), repeat=frames):
        probability = sum(log_probs[t, s] for t, s in enumerate(path))
        found[collapse(path)] = np.logaddexp(found[collapse(path)], probability)
    return found


def random_frames(seed, frames, symbols):
    logits = np.random.default_rng(seed).normal(scale=2, size=(frames, symbols))
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def exhaustive(**options):
    return PrefixBeamSearch(BLANK, beam=10**6, threshold=math.inf, **options)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 4))
def test_without_limits_every_transcript_has_its_exact_probability(seed, frames, symbols):
    log_probs = random_frames(seed, frames, symbols)
    expected = all_transcripts(log_probs)
    found = exhaustive().search(log_probs)
    assert {tuple(tokens) for tokens, _ in found} == set(expected)
    for tokens, score in found:
        assert score == pytest.approx(expected[tuple(tokens)], abs=1e-9)
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
    assert np.logaddexp.reduce(scores) == pytest.approx(0, abs=1e-9)


def test_it_finds_what_best_path_misses():
    """Two frames of 0.6 blank and 0.4 a: the best path is silent, 0.36; but a has 0.16 + 2 x 0.24 = 0.64."""
    log_probs = torch.tensor([[0.6, 0.4], [0.6, 0.4]]).log()[None]
    assert best_path(log_probs, [2], BLANK)[0][0]["tokens"].tolist() == []
    ((hypothesis,),) = PrefixBeamSearch(BLANK, beam=2)(log_probs, [2])
    assert hypothesis["tokens"].tolist() == [1]
    assert hypothesis["score"] == pytest.approx(math.log(0.64) / 2)


def test_a_repeated_symbol_needs_a_blank_between():
    log_probs = torch.full((1, 3, 2), -20.0)
    log_probs[0, [0, 1, 2], [1, 0, 1]] = 0.0
    ((hypothesis,),) = PrefixBeamSearch(BLANK, beam=4)(log_probs, [3])
    assert hypothesis["tokens"].tolist() == [1, 1]
    assert hypothesis["alignment"] == [(0, 0), (2, 1)]
    assert hypothesis["positional_scores"].tolist() == pytest.approx([0, 0])


def test_padding_is_not_decoded_and_nbest_is_sorted():
    frames = torch.tensor(random_frames(3, 6, 4), dtype=torch.float32)
    batch = torch.stack([frames, frames])
    batch[1, 4:] = -1e4
    batch[1, 4:, 2] = 0
    search = PrefixBeamSearch(BLANK, beam=50, nbest=3)
    _, padded = search(batch, [6, 4])
    ((*alone,),) = search(frames[None, :4], [4])
    assert len(padded) == 3
    assert [h["tokens"].tolist() for h in padded] == [h["tokens"].tolist() for h in alone]
    assert [h["score"] for h in padded] == sorted((h["score"] for h in alone), reverse=True)


def test_no_frames_no_words():
    ((hypothesis,),) = PrefixBeamSearch(BLANK, beam=2)(torch.zeros(1, 3, 4), [0])
    assert hypothesis["tokens"].tolist() == []
    assert hypothesis["score"] == 0
    assert len(hypothesis["positional_scores"]) == 0


@pytest.mark.parametrize("beam", [1, 3])
def test_the_beam_is_kept(beam):
    assert len(PrefixBeamSearch(BLANK, beam).search(random_frames(0, 12, 5))) == beam


class FixedWords:
    """A unigram: ln p of a word, of the end, and a bonus a word."""

    words = {"a": -1.0, "b": -0.5, "ab": -3.0, "</s>": -0.25}
    unknown = -4.0

    def start(self):
        return Judged(0.0, None)

    def extend(self, judged, text):
        *ended, word = (judged.word + text).split(" ")
        return Judged(judged.score + sum(self.words.get(w, self.unknown) for w in ended if w), None, word)

    def finish(self, judged):
        return self.extend(judged, " ").score + self.words["</s>"]


def test_the_language_model_scores_whole_words_and_the_end():
    texts = ["", "a", "b", " "]  # blank, a, b, the space
    log_probs = random_frames(11, 5, 4)
    search = exhaustive(language_model=FixedWords(), texts=texts)
    for tokens, score in search.search(log_probs):
        words = "".join(texts[token] for token in tokens).split()
        fused = sum(FixedWords.words.get(word, FixedWords.unknown) for word in [*words, "</s>"])
        assert score == pytest.approx(all_transcripts(log_probs)[tuple(tokens)] + fused, abs=1e-9), words


def test_the_language_model_decides_between_equals():
    """a and b are equally likely in every frame; the model prefers b."""
    log_probs = torch.tensor([[0.2, 0.4, 0.4, 0.0]]).log()[None]
    search = PrefixBeamSearch(BLANK, 4, language_model=FixedWords(), texts=["", "a", "b", " "])
    ((hypothesis,),) = search(log_probs, [1])
    assert hypothesis["tokens"].tolist() == [2]
