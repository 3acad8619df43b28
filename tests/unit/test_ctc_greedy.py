"""Best-path decoding, checked by hand."""

import math

import pytest
import torch

from speech_mt.decoding.ctc_greedy import best_path

BLANK = 0


def log_probs(symbols, probability=0.7, vocabulary=4):
    """(1, frames, vocabulary): each frame gives its symbol ``probability`` and shares the rest."""
    out = torch.full((1, len(symbols), vocabulary), (1 - probability) / (vocabulary - 1))
    out[0, torch.arange(len(symbols)), torch.tensor(symbols, dtype=torch.long)] = probability
    return out.log()


@pytest.mark.parametrize(
    ("frames", "tokens"),
    [
        ([1, 1, 0, 1, 2, 2, 3], [1, 1, 2, 3]),
        ([0, 0, 0], []),
        ([2, 2, 2], [2]),
        ([0, 3, 0, 0, 3, 0], [3, 3]),
        ([1], [1]),
        ([], []),
    ],
)
def test_repeats_collapse_and_blanks_drop(frames, tokens):
    ((hypothesis,),) = best_path(log_probs(frames), [len(frames)], BLANK)
    assert hypothesis["tokens"].tolist() == tokens
    assert len(hypothesis["positional_scores"]) == len(tokens)


def test_scores_and_alignment_by_hand():
    probabilities = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0], [0.4, 0.6, 0.0], [0.1, 0.1, 0.8]])
    ((hypothesis,),) = best_path(probabilities.log()[None], [4], BLANK)
    assert hypothesis["tokens"].tolist() == [1, 2]
    expected = [(math.log(0.8) + math.log(0.6)) / 2, math.log(0.8)]
    assert hypothesis["positional_scores"].tolist() == pytest.approx(expected)
    assert hypothesis["score"] == pytest.approx(sum(map(math.log, (0.9, 0.8, 0.6, 0.8))) / 4)
    assert hypothesis["alignment"] == [(1, 0), (3, 1)]
