"""Cutting up long audio: every frame is kept once, and no cut falls into sound."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speech_mt.errors import InputError
from speech_mt.inference.long_audio import Chunk, cut_at_pauses, overlapping_chunks


@given(st.integers(1, 3000), st.integers(100, 400), st.integers(0, 60), st.integers(1, 6))
def test_overlapping_chunks_keep_each_frame_once(frames, size, overlap, stride):
    chunks = overlapping_chunks(frames, size, overlap, stride)
    assert chunks[0].keep_start == 0
    assert chunks[-1].keep_end == frames
    for left, right in zip(chunks, chunks[1:], strict=False):
        assert left.keep_end == right.keep_start
        assert left.end - right.start >= overlap
        # what is kept lies half the overlap away from the cuts
        assert left.end - left.keep_end >= overlap / 2
        assert right.keep_start - right.start >= overlap / 2
    for chunk in chunks:
        assert 0 <= chunk.start <= chunk.keep_start < chunk.keep_end <= chunk.end <= frames
        assert chunk.end - chunk.start <= size
        assert chunk.start % stride == chunk.keep_start % stride == 0


def test_short_audio_is_one_chunk():
    assert overlapping_chunks(100, 100, 20, 4) == [Chunk(0, 100, 0, 100)]


def test_by_hand():
    assert overlapping_chunks(250, 100, 16, 4) == [
        Chunk(0, 100, 0, 92),
        Chunk(84, 184, 92, 176),
        Chunk(168, 250, 176, 250),
    ]


def test_an_overlap_as_long_as_the_chunk_is_refused():
    with pytest.raises(InputError, match="chunks of 100 frames that overlap by 100 advance by nothing"):
        overlapping_chunks(250, 100, 100, 4)
    with pytest.raises(InputError, match="cannot be cut within its last 100"):
        cut_at_pauses(torch.zeros(250, 3), 100, 100)


def test_attention_is_cut_in_the_pauses():
    features = torch.ones(1000, 4)
    pauses = [range(90, 120), range(300, 340), range(480, 500), range(560, 600), range(780, 810)]
    for pause in pauses:
        features[pause] = -10.0
    chunks = cut_at_pauses(features, size=250, window=150)
    assert [chunk.start for chunk in chunks][1:] == [chunk.end for chunk in chunks][:-1]
    assert (chunks[0].start, chunks[-1].end) == (0, 1000)
    assert all(chunk.end - chunk.start <= 250 for chunk in chunks)
    for chunk in chunks[1:]:
        assert any(chunk.start in pause for pause in pauses)


def test_short_audio_is_not_cut():
    assert cut_at_pauses(torch.zeros(250, 3), 250, 100) == [Chunk(0, 250, 0, 250)]
