"""Cached features are those computed from the audio; extraction resumes, and a bad file stops nothing else."""

import numpy as np
import pytest
import soundfile
import torch

from speech_mt.data import feature_cache
from speech_mt.data.feature_cache import cached_log_mel, extract_features, has_cache
from speech_mt.data.features import FeatureConfig, utterance_log_mel
from speech_mt.data.manifest import read_manifest, write_manifest
from speech_mt.errors import InputError

RATE = 16000


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache, "_UTTERANCES_PER_SHARD", 2)
    generator = np.random.default_rng(0)
    rows = []
    for k, samples in enumerate([4000, 8000, 300, 6000, 5000]):  # the third is shorter than a window
        soundfile.write(tmp_path / f"{k}.wav", generator.uniform(-0.5, 0.5, samples), 16000)
        row = {
            "id": f"u{k}",
            "audio": f"{k}.wav",
            "duration": samples / 16000,
            "text": 'a "b"',
            "speaker": "s",
        }
        rows.append(row | {"note": "null"})
    write_manifest(tmp_path / "train.tsv", rows)
    feature_cache._map_shard.cache_clear()
    return tmp_path / "train.tsv"


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("float16", 0.01)])
def test_cache_equals_computation(path, dtype, tolerance):
    before = read_manifest(path)
    folder = extract_features(path, dtype=dtype, workers=2)
    after = read_manifest(path)
    assert has_cache(after)
    assert not has_cache(before)
    assert after.columns == (*before.columns, "features", "offset", "frames")
    assert after.numbers("frames").tolist() == [23, 48, 0, 36, 29]
    for k in range(5):
        assert before.row(k).items() <= after.row(k).items()
        features = cached_log_mel(after, k, 80, RATE)
        assert features.dtype == torch.float32
        if k != 2:
            expected = utterance_log_mel(before, k, FeatureConfig())
            torch.testing.assert_close(features, expected, atol=tolerance, rtol=0)
    assert {np.load(file, allow_pickle=False).dtype.name for file in folder.glob("shard-?????.npy")} == {
        dtype
    }


def test_a_second_run_computes_nothing(path, monkeypatch):
    folder = extract_features(path)
    content = path.read_bytes()
    monkeypatch.setattr(feature_cache, "_write_shards", None)  # calling it would fail
    assert extract_features(path) == folder
    assert path.read_bytes() == content


def test_other_settings_go_elsewhere(path):
    folders = [
        extract_features(path, config=config) for config in (FeatureConfig(), FeatureConfig(num_mel_bins=40))
    ]
    assert folders[0] != folders[1]
    assert cached_log_mel(read_manifest(path), 0, 40, RATE).shape == (23, 40)


def test_a_bad_file_is_named_and_the_rest_is_kept(path):
    good = (path.parent / "3.wav").read_bytes()
    (path.parent / "3.wav").write_bytes(b"no audio")
    content = path.read_bytes()
    with pytest.raises(InputError, match=r"1 utterances cannot be used.*line 5, utterance 'u3': .*3\.wav"):
        extract_features(path)
    assert path.read_bytes() == content
    kept = {file: file.stat().st_mtime_ns for file in path.parent.rglob("shard-?????.npy")}
    assert sorted(file.name for file in kept) == ["shard-00000.npy", "shard-00002.npy"]
    (path.parent / "3.wav").write_bytes(good)
    extract_features(path)
    assert all(file.stat().st_mtime_ns == time for file, time in kept.items())
    assert cached_log_mel(read_manifest(path), 3, 80, RATE).shape == (36, 80)


def test_out_folder_elsewhere(path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("cache")
    folder = extract_features(path, elsewhere)
    assert folder.parent == elsewhere
    assert cached_log_mel(read_manifest(path), 4, 80, RATE).shape == (29, 80)


def test_faults_of_the_cache_name_the_utterance(path):
    folder = extract_features(path)
    manifest = read_manifest(path)
    with pytest.raises(InputError, match="utterance 'u0': expected .* of 40 mel bins in .*of 80"):
        cached_log_mel(manifest, 0, 40, RATE)
    feature_cache._map_shard.cache_clear()
    np.save(folder / "shard-00000.npy", np.zeros((50, 80), np.float16))  # 71 frames are due
    assert len(cached_log_mel(manifest, 0, 80, RATE)) == 23
    with pytest.raises(InputError, match="utterance 'u1': expected frames 23 to 71 .*50 frames"):
        cached_log_mel(manifest, 1, 80, RATE)
    feature_cache._map_shard.cache_clear()
    np.save(folder / "shard-00000.npy", np.array([{"pickled": 1}]), allow_pickle=True)
    with pytest.raises(InputError, match="utterance 'u0': .*holds no cached features"):
        cached_log_mel(manifest, 0, 80, RATE)
    (folder / "shard-00001.npy").unlink()
    with pytest.raises(InputError, match="utterance 'u3': .*holds no cached features"):
        cached_log_mel(manifest, 3, 80, RATE)


def test_features_of_another_sample_rate_are_refused(path):
    extract_features(path)
    with pytest.raises(InputError, match="made from audio at 16000 Hz, --sample-rate is 8000"):
        cached_log_mel(read_manifest(path), 0, 80, 8000)
