"""Audio becomes mono float32 at the rate asked for, or a message that names the file."""

import numpy as np
import pytest
import soundfile

from speech_mt.data.audio import audio_duration, read_audio
from speech_mt.errors import InputError


def tone(samples, rate=16000, hertz=440.0):
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(samples) / rate)).astype(np.float32)


@pytest.mark.parametrize("suffix", ["wav", "flac"])
def test_samples_are_read_as_written(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, tone(1600), 16000)
    samples = read_audio(path, 16000)
    assert samples.dtype == np.float32
    np.testing.assert_allclose(samples, tone(1600), atol=2**-15)
    assert audio_duration(path) == 0.1


def test_channels_are_averaged(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.tile([[0.5, -0.25]], (800, 1)), 16000)
    np.testing.assert_array_equal(read_audio(tmp_path / "a.wav", 16000), np.full(800, 0.125, np.float32))


def test_another_rate_is_refused_with_both_rates_or_resampled(tmp_path):
    path = tmp_path / "a.wav"
    soundfile.write(path, tone(4000, rate=8000), 8000)
    with pytest.raises(InputError, match=r"a\.wav: sampled at 8000 Hz, expected 16000 Hz"):
        read_audio(path, 16000)
    samples = read_audio(path, 16000, resample=True)
    assert len(samples) == 8000
    inner = slice(200, -200)  # without the filter's edges
    np.testing.assert_allclose(samples[inner], tone(8000)[inner], atol=0.01)


def test_no_samples(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(0, np.float32), 16000)
    with pytest.raises(InputError, match=r"a\.wav: holds no audio \(0 samples\)"):
        read_audio(tmp_path / "a.wav", 16000)


@pytest.mark.parametrize("content", [b"", b"not audio at all", b"fLaC"])
def test_what_is_no_audio(tmp_path, content):
    (tmp_path / "a.flac").write_bytes(content)
    for read in (lambda path: read_audio(path, 16000), audio_duration):
        with pytest.raises(InputError, match=r"a\.flac: not an audio file"):
            read(tmp_path / "a.flac")


def test_truncated_flac(tmp_path):
    path = tmp_path / "a.flac"
    soundfile.write(path, np.random.default_rng(0).uniform(-1, 1, 64000), 16000)
    path.write_bytes(path.read_bytes()[:60000])
    with pytest.raises(InputError, match=r"a\.flac: (truncated|cannot be decoded)"):
        read_audio(path, 16000)


def test_samples_that_are_not_numbers(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.array([0.0, np.nan], np.float32), 16000, subtype="FLOAT")
    with pytest.raises(InputError, match="not finite"):
        read_audio(tmp_path / "a.wav", 16000)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match=r"a\.wav: no such audio file"):
        read_audio(tmp_path / "a.wav", 16000)
