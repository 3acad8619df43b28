"""Batches of a speech dataset: shapes, order, what is left out, and SpecAugment with any number of workers."""

import numpy as np
import pytest
import soundfile
import torch
from fairseq.data.iterators import EpochBatchIterator

from speech_mt.data.feature_cache import extract_features
from speech_mt.data.features import FeatureConfig, frame_count
from speech_mt.data.manifest import read_manifest, write_manifest
from speech_mt.data.specaugment import POLICIES, apply_masks
from speech_mt.data.speech_dataset import SpeechDataset
from speech_mt.data.speed import SpeedPerturbation
from speech_mt.data.transcripts import CharacterTokenizer
from speech_mt.errors import InputError

INDICES = {s: k for k, s in enumerate(["<s>", "<pad>", "</s>", "<unk>", "|", "a", "b"])}
PAD, EOS = 1, 2
SAMPLES = [8000, 16000, 4000, 399, 12000]
TEXTS = ["ab", "a b", "b", "b", "aaaa bbbb"]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    generator = np.random.default_rng(0)
    for k, samples in enumerate(SAMPLES):
        soundfile.write(folder / f"{k}.wav", generator.uniform(-0.5, 0.5, samples), 16000)
    rows = (
        {"id": f"u{k}", "audio": f"{k}.wav", "duration": samples / 16000, "text": TEXTS[k], "speaker": "s"}
        for k, samples in enumerate(SAMPLES)
    )
    write_manifest(folder / "train.tsv", rows)
    return read_manifest(folder / "train.tsv")


def dataset(manifest, **options):
    return SpeechDataset(manifest, FeatureConfig(), CharacterTokenizer(INDICES), pad=PAD, eos=EOS, **options)


def test_a_batch(manifest):
    data = dataset(manifest)
    batch = data.collater([data[k] for k in (0, 1, 2)])
    assert batch["id"].tolist() == [0, 1, 2]
    assert (batch["nsentences"], batch["ntokens"]) == (3, 9)
    source, lengths = batch["net_input"]["src_tokens"], batch["net_input"]["src_lengths"]
    assert source.shape == (3, 98, 80)
    assert source.dtype == torch.float32
    assert lengths.tolist() == [48, 98, 23]
    for row, length in zip(source, lengths, strict=True):
        assert row[length:].abs().sum() == 0
        assert row[:length].mean().item() == pytest.approx(0, abs=1e-5)
        assert row[:length].std(correction=0).item() == pytest.approx(1, abs=1e-5)
    assert batch["target"].tolist() == [[5, 6, EOS, PAD], [5, 4, 6, EOS], [6, EOS, PAD, PAD]]
    previous = batch["net_input"]["prev_output_tokens"].tolist()
    assert previous == [[EOS, 5, 6, PAD], [EOS, 5, 4, 6], [EOS, 6, PAD, PAD]]
    assert batch["target_lengths"].tolist() == [2, 3, 1]
    assert data.collater([]) == {}


def test_sizes_need_no_audio(manifest, tmp_path):
    write_manifest(
        tmp_path / "m.tsv", ({**manifest.row(k), "audio": "none.wav"} for k in range(len(manifest)))
    )
    data = dataset(read_manifest(tmp_path / "m.tsv"))
    assert data.frames.tolist() == [48, 98, 23, 0, 73]
    assert data.sizes.tolist() == [list(data.size(k)) for k in range(5)]
    assert data.sizes[:, 1].tolist() == [3, 4, 2, 2, 10]
    assert (
        data.num_tokens_vec(np.array([4, 0])).tolist() == [data.num_tokens(4), data.num_tokens(0)] == [73, 48]
    )
    with pytest.raises(InputError, match=r"m\.tsv line 3, utterance 'u1': .*none\.wav: no such audio file"):
        data[1]


def test_order_is_by_length_with_ties_by_seed_and_epoch_in_training(manifest):
    assert dataset(manifest).ordered_indices().tolist() == [1, 4, 0, 2, 3]
    orders = {}
    for seed, epoch in [(1, epoch) for epoch in range(1, 40)] + [(2, 1)]:
        data = dataset(manifest, training=True, seed=seed)
        data.frames = np.array([5, 9, 5, 9, 5])
        data.set_epoch(epoch)
        np.random.seed(epoch)  # plays no part
        order = orders[seed, epoch] = tuple(data.ordered_indices().tolist())
        assert data.frames[list(order)].tolist() == [9, 9, 5, 5, 5]
        assert data.ordered_indices().tolist() == list(order)
    assert len(set(orders.values())) > 5


def test_training_batches_are_made_anew_each_epoch(manifest):
    assert not dataset(manifest, training=True).can_reuse_epoch_itr_across_epochs
    assert dataset(manifest).can_reuse_epoch_itr_across_epochs


def test_exclusions_have_one_reason_each(manifest, tmp_path):
    rows = [manifest.row(k) for k in range(len(manifest))]
    write_manifest(tmp_path / "m.tsv", [*rows, rows[0] | {"id": "mute", "text": " "}])
    manifest = read_manifest(tmp_path / "m.tsv")
    everything = np.array([5, 4, 3, 2, 1, 0])

    def excluded(limits, **options):
        found = dataset(manifest, **options).exclusions(everything, limits)
        return {reason: rows.tolist() for reason, rows in found.items()}

    too_short, too_long = "less audio than one window of 25 ms", "more than 90 frames"
    assert excluded((None, None)) == {too_short: [3]}
    assert excluded((90, None)) == {too_short: [3], too_long: [1]}
    too_many = "more than 3 target units, the end of sentence counted"
    assert excluded((90, 3)) == {too_short: [3], too_long: [1], too_many: [4]}
    silent = "no transcript"
    assert excluded((None, None), training=True) == {too_short: [3], silent: [5]}
    # "aaaa bbbb": 9 symbols and 6 blanks between equal ones, 15 frames; 73 // 5 = 14, 73 // 4 = 18
    starved = "fewer encoder frames than CTC needs"
    assert excluded((None, None), training=True, ctc_subsampling=4) == {too_short: [3], silent: [5]}
    assert excluded((None, None), training=True, ctc_subsampling=5) == {
        too_short: [3],
        silent: [5],
        starved: [4],
    }
    assert excluded((None, None), ctc_subsampling=5) == {too_short: [3]}  # validation keeps them


def test_filtering_keeps_the_order(manifest):
    kept, ignored = dataset(manifest).filter_indices_by_size(np.array([4, 3, 2, 1, 0]), (90, None))
    assert kept.tolist() == [4, 2, 0]
    assert sorted(ignored) == [1, 3]


def test_a_batch_too_small_for_one_utterance_is_refused(manifest):
    data = dataset(manifest)
    with pytest.raises(InputError, match="line 3, utterance 'u1' has 98 frames, a batch may hold 90"):
        data.batch_by_size(data.ordered_indices(), max_tokens=90)
    batches = data.batch_by_size(data.ordered_indices(), max_tokens=150)
    assert [list(batch) for batch in batches] == [[1], [4, 0], [2, 3]]


def epochs(manifest, workers, start=1):
    """Masked sources of epochs ``start`` to 3 as fairseq would load them, by epoch and utterance."""
    data = dataset(manifest, training=True, specaugment=POLICIES["librispeech_100h"], seed=7)
    batches = EpochBatchIterator(
        data,
        data.collater,
        [[0, 1], [2, 4]],
        num_workers=workers,
        epoch=start,
        reuse_dataloader=True,
        persistent_workers=True,
    )
    sources = {}
    for epoch in range(start, 4):
        for batch in batches.next_epoch_itr(shuffle=True):
            masked = apply_masks(batch["net_input"]["src_tokens"], *batch["masks"])
            for index, source in zip(batch["id"].tolist(), masked, strict=True):
                sources[epoch, index] = source
    return sources


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")
def test_masks_change_by_epoch_and_not_by_workers_or_resumption(manifest):
    expected = epochs(manifest, workers=0)
    assert len({source.numpy().tobytes() for source in expected.values()}) == 12
    for other in (epochs(manifest, workers=2), epochs(manifest, workers=2, start=3)):
        assert other
        assert all(torch.equal(source, expected[key]) for key, source in other.items())


def test_no_masks_outside_training(manifest):
    assert "masks" not in dataset(manifest, specaugment=POLICIES["ld"])[1]
    assert "masks" not in dataset(manifest, training=True)[1]
    assert any(mask.any() for mask in dataset(manifest, training=True, specaugment=POLICIES["ld"])[1]["masks"])


def test_masks_of_a_batch_are_those_of_its_utterances(manifest):
    data = dataset(manifest, training=True, specaugment=POLICIES["librispeech_100h"])
    batch = data.collater([data[0], data[1]])
    time, freq = batch["masks"]
    assert (time.shape, freq.shape) == ((2, 98), (2, 80))
    for row, index in enumerate((0, 1)):
        frames = int(data.frames[index])
        expected_time, expected_freq = data[index]["masks"]
        assert torch.equal(time[row, :frames], expected_time)
        assert torch.equal(freq[row], expected_freq)
        assert not time[row, frames:].any()


class TestSpeedPerturbation:
    SPEEDS = SpeedPerturbation((0.9, 1.0, 1.1))

    def test_lengths_follow_the_epochs_speeds(self, manifest):
        data = dataset(manifest, training=True, speed_perturbation=self.SPEEDS)
        seen = set()
        for epoch in range(1, 6):
            data.set_epoch(epoch)
            speeds = data.speeds()
            seen |= set(speeds.tolist())
            expected = frame_count(np.rint(np.array(SAMPLES) / speeds).astype(int), 16000)
            assert data.frames.tolist() == expected.tolist()
            for index in (0, 1, 4):
                assert abs(len(data[index]["source"]) - data.frames[index]) <= 1
        assert seen == {0.9, 1.0, 1.1}

    def test_speeds_are_a_function_of_seed_and_epoch(self, manifest):
        one, other = (dataset(manifest, training=True, speed_perturbation=self.SPEEDS) for _ in range(2))
        one.set_epoch(3)
        one.speeds()
        one.set_epoch(2)
        other.set_epoch(2)
        assert one.speeds().tolist() == other.speeds().tolist()
        assert torch.equal(one[1]["source"], other[1]["source"])

    def test_only_training_is_perturbed(self, manifest):
        data = dataset(manifest, speed_perturbation=self.SPEEDS)
        assert torch.equal(data[1]["source"], dataset(manifest)[1]["source"])

    def test_cached_features_have_one_speed(self, manifest, tmp_path):
        rows = [manifest.row(k) | {"audio": str(manifest.audio_path(k))} for k in range(3)]
        write_manifest(tmp_path / "m.tsv", rows)
        extract_features(tmp_path / "m.tsv")
        with pytest.raises(InputError, match="speed-perturb needs the audio"):
            dataset(read_manifest(tmp_path / "m.tsv"), training=True, speed_perturbation=self.SPEEDS)


def test_cached_features_take_the_place_of_audio(manifest, tmp_path):
    rows = [manifest.row(k) | {"audio": str(manifest.audio_path(k))} for k in range(len(manifest))]
    write_manifest(tmp_path / "m.tsv", rows)
    extract_features(tmp_path / "m.tsv", dtype="float32")
    with_cache = read_manifest(tmp_path / "m.tsv")
    write_manifest(tmp_path / "m.tsv", [with_cache.row(k) | {"audio": "none.wav"} for k in range(5)])
    data = dataset(read_manifest(tmp_path / "m.tsv"))
    assert data.frames.tolist() == dataset(manifest).frames.tolist()
    assert torch.equal(data[1]["source"], dataset(manifest)[1]["source"])


def test_cached_features_that_are_not_finite_are_named(manifest, tmp_path):
    rows = [manifest.row(k) | {"audio": str(manifest.audio_path(k))} for k in range(len(manifest))]
    write_manifest(tmp_path / "m.tsv", rows)
    folder = extract_features(tmp_path / "m.tsv")
    shard = np.load(folder / "shard-00000.npy", allow_pickle=False)
    shard[50] = np.nan  # of the second utterance
    np.save(folder / "shard-00000.npy", shard)
    data = dataset(read_manifest(tmp_path / "m.tsv"))
    assert data[0]["source"].isfinite().all()
    with pytest.raises(InputError, match="utterance 'u1': its cached features are not finite"):
        data[1]
