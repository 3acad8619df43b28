"""CAPE: centred, continuous positions; padding plays no part; training moves them as far as it may."""

import math

import pytest
import torch

from speech_mt.modules.positions import CAPE

MASK = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [True] * 2 + [False] * 3])


def test_times_are_centred_and_ignore_padding_on_either_side():
    times = CAPE(4, 0.03).centred_times(MASK)
    torch.testing.assert_close(times[0], torch.tensor([-0.06, -0.03, 0.0, 0.03, 0.06]))
    torch.testing.assert_close(times[1, :3], torch.tensor([-0.03, 0.0, 0.03]))
    torch.testing.assert_close(times[2, 2:], times[1, :3])


def test_values_by_hand():
    cape = CAPE(4, 0.03, freq_scale=30.0).eval()
    embedded = cape(MASK[:1])[0, 4]  # 0.06 s
    low = 30 / 100  # 10000^(-2/4) = 1/100
    expected = [math.sin(1.8), math.cos(1.8), math.sin(0.06 * low), math.cos(0.06 * low)]
    torch.testing.assert_close(embedded, torch.tensor(expected))


def test_an_utterance_has_its_positions_alone_and_in_a_batch():
    cape = CAPE(6, 0.03, global_shift=30.0, local_shift=0.5, global_scale=1.5).eval()
    torch.testing.assert_close(cape(MASK)[1, :3], cape(torch.zeros(1, 3, dtype=torch.bool))[0])


def test_training_shifts_and_stretches_within_the_limits_and_evaluation_does_not():
    torch.manual_seed(0)
    mask = torch.zeros(400, 3, dtype=torch.bool)
    plain = CAPE(4, 0.03).centred_times(mask)

    def moved(**options):
        return CAPE(4, 0.03, **options).augment(plain)

    shift = moved(global_shift=2.0) - plain
    assert torch.allclose(shift, shift[:, :1], atol=1e-6)  # one an utterance
    assert 1.9 < shift.abs().max() <= 2.0
    jitter = moved(local_shift=0.5) - plain
    assert 0.0149 < jitter.abs().max() <= 0.015 + 1e-6
    assert len(jitter[0].unique()) == 3  # one a position
    ratio = moved(global_scale=1.5)[:, 0] / plain[:, 0]
    assert 1 / 1.5 - 1e-5 <= ratio.min() < 0.68 < 1.49 < ratio.max() <= 1.5 + 1e-5
    assert torch.equal(CAPE(4, 0.03, global_shift=2.0).eval().augment(plain), plain)


@pytest.mark.parametrize("options", [{"dim": 3}, {"frame_seconds": 0.0}, {"global_shift": -1.0}, {"global_scale": 0.5}])
def test_numbers_out_of_range(options):
    with pytest.raises(ValueError, match="CAPE"):
        CAPE(**({"dim": 4, "frame_seconds": 0.03} | options))
