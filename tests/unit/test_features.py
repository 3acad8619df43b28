"""Filterbanks and their normalisation: counts of frames, limits and special inputs."""

import numpy as np
import pytest
import soundfile
import torch

from speech_mt.data.features import (
    FeatureConfig,
    frame_count,
    log_mel_filterbank,
    normalize,
    utterance_log_mel,
)
from speech_mt.data.manifest import read_manifest, write_manifest
from speech_mt.errors import InputError


def noise(samples):
    return np.random.default_rng(0).uniform(-0.5, 0.5, samples).astype(np.float32)


@pytest.mark.parametrize(
    ("samples", "rate", "frames"),
    [(0, 16000, 0), (399, 16000, 0), (400, 16000, 1), (559, 16000, 1), (560, 16000, 2), (16000, 16000, 98)]
    + [(8000, 8000, 98), (1102, 44100, 1), (1102 + 441, 44100, 2)],
)
def test_frame_count(samples, rate, frames):
    assert frame_count(samples, rate) == frames
    if frames:
        assert len(log_mel_filterbank(noise(samples), rate)) == frames


@pytest.mark.parametrize(("rate", "bins"), [(16000, 80), (8000, 40), (22050, 64)])
def test_filterbanks_are_kaldis(rate, bins):
    """Those of torchaudio, also beyond a block of frames; the offset and the tone are for DC removal and leakage."""
    from torchaudio.compliance.kaldi import fbank

    samples = 0.2 * noise(3 * rate) + 0.3 * np.sin(np.arange(3 * rate) / 9).astype(np.float32) + np.float32(0.1)
    options = {"num_mel_bins": bins, "sample_frequency": float(rate), "dither": 0.0}
    expected = fbank(torch.from_numpy(samples).double()[None] * 32768, **options).float()
    found = log_mel_filterbank(samples, rate, bins)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_mel_bins": 0}, "--num-mel-bins 0: has to be 4 to 256 at 16000 Hz"),
        ({"num_mel_bins": 100000}, "--num-mel-bins 100000: has to be 4 to 256"),
        ({"num_mel_bins": 200, "sample_rate": 8000}, "has to be 4 to 128 at 8000 Hz"),
        ({"sample_rate": 0}, "--sample-rate 0: has to be at least 1000 Hz"),
    ],
)
def test_numbers_that_no_filterbank_has(options, words):
    with pytest.raises(InputError, match=words):
        FeatureConfig(**options)


def test_a_louder_waveform_shifts_all_filterbanks_by_the_same_logarithm():
    quiet, loud = (log_mel_filterbank(gain * noise(4000), 16000, num_mel_bins=40) for gain in (0.1, 1.0))
    assert quiet.shape == (23, 40)
    torch.testing.assert_close(
        loud - quiet, torch.full((23, 40), 2 * np.log(10.0)).float(), atol=1e-3, rtol=0
    )


def test_a_tone_is_loudest_in_the_filter_around_it():
    tone = (0.5 * np.sin(2 * np.pi * 1000 * np.arange(8000) / 16000)).astype(np.float32)
    mel = lambda hertz: 1127 * np.log(1 + hertz / 700)  # noqa: E731
    centres = mel(20) + (mel(8000) - mel(20)) * np.arange(1, 81) / 81
    expected = int(np.abs(centres - mel(1000)).argmin())
    assert set(log_mel_filterbank(tone, 16000).argmax(dim=1).tolist()) == {expected}


def test_digital_silence_is_finite_and_normalises_to_zero():
    features = log_mel_filterbank(np.zeros(16000, np.float32), 16000)
    assert features.isfinite().all()
    for method in ("utterance", "per_bin"):
        assert normalize(features, method).abs().max() == 0


def test_shorter_than_one_window():
    with pytest.raises(InputError, match=r"24\.9 ms of audio are shorter than one window of 25 ms"):
        log_mel_filterbank(noise(399), 16000)


def test_normalisation_by_hand():
    features = torch.tensor([[1.0, 2.0], [3.0, 6.0]])  # mean 3, variance (4 + 1 + 0 + 9) / 4
    torch.testing.assert_close(normalize(features, "utterance"), (features - 3) / 3.5**0.5)
    torch.testing.assert_close(normalize(features, "per_bin"), torch.tensor([[-1.0, -1.0], [1.0, 1.0]]))
    assert normalize(features, "none") is features


def test_one_frame_has_no_variance_per_bin():
    assert normalize(torch.tensor([[5.0, -3.0]]), "per_bin").tolist() == [[0.0, 0.0]]


def test_faults_of_an_utterance_name_it(tmp_path):
    soundfile.write(tmp_path / "a.wav", noise(16000), 16000)
    soundfile.write(tmp_path / "b.wav", noise(8000), 8000)
    row = {"audio": "a.wav", "text": "", "speaker": ""}
    rows = [row | {"id": "right", "duration": 1.0}, row | {"id": "long", "duration": 1.5}]
    write_manifest(tmp_path / "m.tsv", [*rows, row | {"id": "slow", "duration": 1.0, "audio": "b.wav"}])
    manifest = read_manifest(tmp_path / "m.tsv")
    assert utterance_log_mel(manifest, 0, FeatureConfig()).shape == (98, 80)
    with pytest.raises(
        InputError, match=r"m\.tsv line 3, utterance 'long': duration is 1\.5 s, .*a\.wav lasts 1 s"
    ):
        utterance_log_mel(manifest, 1, FeatureConfig())
    with pytest.raises(InputError, match=r"m\.tsv line 4, utterance 'slow': .*b\.wav: sampled at 8000 Hz"):
        utterance_log_mel(manifest, 2, FeatureConfig())
    assert utterance_log_mel(manifest, 2, FeatureConfig(resample=True)).shape == (98, 80)
