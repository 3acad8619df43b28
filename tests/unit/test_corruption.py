"""Corruption: each does what its level says, alike for the same random numbers."""

import numpy as np
import pytest

from speech_mt.data.corruption import AUDIO_CORRUPTIONS, corrupt_audio, corrupt_text
from speech_mt.errors import InputError

RATE = 16000
TIME = np.arange(RATE, dtype=np.float32) / RATE
LEVELS = {"noise": 10, "lowpass": 1000, "clipping": 0.3, "speed": 1.25, "reverberation": 0.3}


def tone(frequency):
    return (0.5 * np.sin(2 * np.pi * frequency * TIME)).astype(np.float32)


def spoilt(samples, kind, level, seed=0):
    return corrupt_audio(samples, RATE, kind, level, np.random.default_rng(seed))


def power(samples):
    return float(np.mean(np.square(samples, dtype=np.float64)))


@pytest.mark.parametrize("level", [-5.0, 0.0, 20.0])
def test_noise_has_the_ratio_to_the_signal(level):
    clean = tone(440)
    noise = spoilt(clean, "noise", level) - clean
    assert 10 * np.log10(power(clean) / power(noise)) == pytest.approx(level, abs=0.01)


def test_a_lowpass_halves_the_power_at_the_cut_off_and_leaves_low_tones():
    for frequency, share in ((100, 1.0), (1000, 0.5), (6000, 0.0)):
        assert power(spoilt(tone(frequency), "lowpass", 1000.0)) / power(tone(frequency)) == pytest.approx(
            share, abs=0.02
        )


def test_clipping_cuts_at_a_share_of_the_peak():
    assert np.abs(spoilt(tone(440), "clipping", 0.3)).max() == pytest.approx(0.15, abs=1e-3)
    assert np.array_equal(spoilt(tone(440), "clipping", 1.0), tone(440))


def test_speed_shortens_and_raises_the_pitch():
    faster = spoilt(tone(400), "speed", 1.25)
    assert len(faster) == pytest.approx(RATE / 1.25, abs=2)
    spectrum = np.abs(np.fft.rfft(faster))
    assert spectrum.argmax() * RATE / len(faster) == pytest.approx(500, abs=2)


def test_reverberation_goes_on_after_the_sound_for_its_time():
    click = np.zeros(RATE, dtype=np.float32)
    click[0] = 1.0
    room = spoilt(click, "reverberation", 0.5)
    assert room[0] == pytest.approx(1.0, abs=1e-4)
    assert power(room[1 : RATE // 2]) * (RATE // 2 - 1) == pytest.approx(1.0, rel=0.01)
    early, late = power(room[1:800]), power(room[RATE // 2 - 801 : RATE // 2 - 1])
    assert 10 * np.log10(early / late) == pytest.approx(54, abs=3)  # 9 tenths of 60 dB, mean over 0.05 s
    assert np.abs(room[RATE // 2 :]).max() < 1e-4


@pytest.mark.parametrize("kind", AUDIO_CORRUPTIONS)
def test_the_same_utterance_is_spoilt_alike(kind):
    samples = np.random.default_rng(1).standard_normal(RATE, dtype=np.float32)
    first, second = spoilt(samples, kind, LEVELS[kind], 3), spoilt(samples, kind, LEVELS[kind], 3)
    assert first.dtype == np.float32
    assert np.array_equal(first, second)
    assert not np.array_equal(first[: len(samples)], samples[: len(first)])


@pytest.mark.parametrize(
    ("kind", "level", "message"),
    [
        ("hum", 1, "corruption 'hum': there are noise, lowpass"),
        ("clipping", 2, "clipping of level 2: give one from 0 to 1"),
        ("lowpass", 9000, "from 1 to 8000"),
    ],
)
def test_what_means_nothing_is_refused(kind, level, message):
    with pytest.raises(InputError, match=message):
        spoilt(tone(440), kind, level)


def test_character_noise_changes_its_share_of_characters_and_no_space():
    text = "einundzwanzig millionen dreihundert " * 40
    random = np.random.default_rng(0)
    assert corrupt_text(text, 0.0, random) == text
    changed = corrupt_text(text, 0.1, random)
    assert changed.count(" ") == text.count(" ")
    same = sum(a == b for a, b in zip(text.split(), changed.split(), strict=True)) / len(text.split())
    assert same == pytest.approx(np.mean([0.9 ** len(word) for word in text.split()]), abs=0.1)
    assert corrupt_text(text, 0.1, np.random.default_rng(5)) == corrupt_text(text, 0.1, np.random.default_rng(5))
    with pytest.raises(InputError, match="a probability"):
        corrupt_text(text, 1.5, random)
