"""A spike is a value seven deviations from the mean of those before it; nothing else is."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from speech_mt.diagnostics.spikes import SpikeScore


def alternating(count):
    """Mean 2, standard deviation 1."""
    return [1.0, 3.0] * (count // 2)


def test_threshold_is_seven_deviations_of_the_values_before():
    for value, spiked in [(8.9, []), (9.0, ["loss"]), (-5.0, ["loss"]), (-4.9, [])]:
        score = SpikeScore(minimum=10)
        for x in alternating(10):
            assert score.update(loss=x) == []
        assert score.update(loss=value) == spiked


def test_score_is_the_share_of_updates_with_a_spike_in_any_series():
    score = SpikeScore(minimum=10)
    for x in alternating(18):
        score.update(loss=x, gradient_norm=x)
    assert score.update(loss=1e3, gradient_norm=1e3) == ["loss", "gradient_norm"]
    assert score.update(loss=2.0, gradient_norm=1e5) == ["gradient_norm"]
    assert score.score == 2 / 20


def test_equals_brute_force_over_a_rolling_window():
    random.seed(0)
    values = [random.gauss(0, 1) + (50 if i % 37 == 36 else 0) for i in range(600)]
    score = SpikeScore(window=50, minimum=20)
    found = [bool(score.update(loss=x)) for x in values]
    want = []
    for i, x in enumerate(values):
        past = np.array(values[max(0, i - 50) : i])
        want.append(len(past) >= 20 and abs(x - past.mean()) >= 7 * past.std())
    assert found == want
    assert 0 < sum(found) < sum(x > 40 for x in values)  # a spike hides another in the same window


def test_a_huge_value_does_not_blind_it_once_it_has_left_the_window():
    score = SpikeScore(window=10, minimum=10)
    for x in [*alternating(10), 1e30, *alternating(10)]:
        score.update(loss=x)
    assert score.update(loss=100.0) == ["loss"]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_a_spike_and_leaves_no_trace(bad):
    score = SpikeScore(minimum=10)
    assert score.update(loss=bad) == ["loss"]
    for x in alternating(10):
        score.update(loss=x)
    assert score.update(loss=bad) == ["loss"]
    assert score.update(loss=8.9) == []


def test_constant_values_never_spike_and_any_change_after_them_does():
    score = SpikeScore(minimum=10)
    assert all(score.update(loss=0.1) == [] for _ in range(500))
    assert score.update(loss=0.2) == ["loss"]


def test_too_few_values_are_not_judged():
    score = SpikeScore(minimum=10)
    for x in [*alternating(8), 1e3]:
        assert score.update(loss=x) == []
    assert math.isnan(SpikeScore().score)


def test_state_continues_where_it_stopped():
    random.seed(1)
    values = [random.gauss(0, 1) for _ in range(40)] + [30.0, -30.0, 0.0]
    whole, first, second = (SpikeScore(window=30, minimum=20) for _ in range(3))
    for x in values:
        whole.update(loss=x)
    for x in values[:35]:
        first.update(loss=x)
    second.load_state_dict(first.state_dict())
    for x in values[35:]:
        second.update(loss=x)
    assert second.state_dict() == whole.state_dict()
    assert second.score == whole.score > 0


def test_a_minimum_that_can_never_be_reached_is_refused():
    with pytest.raises(ValueError, match="minimum"):
        SpikeScore(window=50, minimum=51)
