"""SpecAugment masks whole bands, within its limits, and the same ones for the same seed, epoch and utterance."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speech_mt.data.specaugment import POLICIES, SpecAugment, apply_masks, mask_generator

NAMES = [name for name, policy in POLICIES.items() if policy is not None]


def augment(policy, features, rng):
    return apply_masks(features, *policy.masks(*features.shape, rng))


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 200), st.sampled_from([1, 2, 20, 80]), st.integers(0, 2**31))
def test_masks_are_bands_and_never_everything(name, frames, bins, index):
    masked = augment(POLICIES[name], torch.ones(frames, bins), mask_generator(1, 1, index)) == 0
    rows, columns = masked.all(dim=1), masked.all(dim=0)
    assert torch.equal(masked, rows[:, None] | columns[None, :])
    if frames:
        assert not rows.any() or not rows[-1]
        assert not masked.all()


@pytest.mark.parametrize("frames", range(6))
def test_very_short_utterances_keep_their_shape(frames):
    for name in NAMES:
        features = torch.ones(frames, 80)
        masked = [augment(POLICIES[name], features, mask_generator(1, 1, index)) for index in range(50)]
        assert all(one.shape == (frames, 80) for one in masked)
        assert features.all()  # the input is left alone


def test_widths_and_the_time_cap():
    policy = SpecAugment(freq_masks=1, freq_width=5, time_masks=1, time_width=50, time_fraction=0.1)
    masked = [augment(policy, torch.ones(80, 40), mask_generator(1, 1, index)) == 0 for index in range(500)]
    time_widths = {int(one.all(dim=1).sum()) for one in masked}
    freq_widths = {int(one.all(dim=0).sum()) for one in masked}
    assert time_widths == set(range(8))  # less than a tenth of 80 frames
    assert freq_widths == set(range(5))


def test_the_mask_is_a_function_of_seed_epoch_and_utterance():
    masks = {
        (seed, epoch, index): augment(POLICIES["ld"], torch.ones(300, 80), mask_generator(seed, epoch, index))
        for seed in (1, 2)
        for epoch in (1, 2)
        for index in (0, 1)
    }
    for key, mask in masks.items():
        np.random.seed(0)  # neither reads nor moves the global state
        before = np.random.get_state()[1].copy()
        assert torch.equal(mask, augment(POLICIES["ld"], torch.ones(300, 80), mask_generator(*key)))
        assert (np.random.get_state()[1] == before).all()
    assert len({mask.numpy().tobytes() for mask in masks.values()}) == len(masks)


def test_policies_mask_the_share_their_parameters_imply():
    # two bands of 0 to 29 of 80 bins, ten of 0 to 49 of 1000 frames, overlaps aside: about 1/3 and 1/5 of each
    masked = [
        augment(POLICIES["librispeech_100h"], torch.ones(1000, 80), mask_generator(1, 1, k)) == 0 for k in range(300)
    ]
    time = np.mean([float(one.all(dim=1).float().mean()) for one in masked])
    freq = np.mean([float(one.all(dim=0).float().mean()) for one in masked])
    assert time == pytest.approx(1 - (1 - 0.0245) ** 10, abs=0.015)
    assert freq == pytest.approx(0.33, abs=0.03)
