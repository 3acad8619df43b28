"""Every fault of a manifest, its audio, cached features and targets is found, and the budget decides the exit."""

import sys

import numpy as np
import pytest
import soundfile

from speech_mt.data.feature_cache import _map_shard, extract_features
from speech_mt.data.manifest import read_manifest, write_manifest
from speech_mt.data.manifest_validation import ManifestChecks, check_manifest, load_tokenizer
from speech_mt.data.validation import DuplicateIds, Fault, FaultCounts, TargetLimits, read_faults, write_faults
from speech_mt.data.vocabulary import build_vocabulary
from speech_mt.errors import InputError

from .test_prepare_librispeech import script

SECONDS = 0.5  # 48 frames


@pytest.fixture
def manifest(tmp_path):
    """Three sound utterances, and the dictionary of their characters."""
    rows = []
    generator = np.random.default_rng(0)
    for k in range(3):
        soundfile.write(tmp_path / f"{k}.wav", generator.uniform(-0.5, 0.5, round(16000 * SECONDS)), 16000)
        rows.append({"id": f"u{k}", "audio": f"{k}.wav", "duration": SECONDS, "text": "null NA", "speaker": "s"})
    write_manifest(tmp_path / "train.tsv", rows)
    build_vocabulary(lambda: ["null NA", 'say "hi"'], tmp_path)
    return tmp_path / "train.tsv"


def faults_of(manifest, ids=None, **limits):
    checks = ManifestChecks(load_tokenizer(manifest.parent, "char"), TargetLimits(**limits))
    return [fault for faults in check_manifest(manifest, checks, ids or DuplicateIds()) for fault in faults]


def replace(manifest, old, new):
    content = manifest.read_bytes()
    assert old in content
    manifest.write_bytes(content.replace(old, new, 1))


def test_a_sound_manifest_has_no_fault(manifest):
    assert not faults_of(manifest, ctc_subsampling=4)


LINE = b"u1\t1.wav\t0.5\tnull NA\ts"


@pytest.mark.parametrize(
    ("line", "kind", "words"),
    [
        (b"u1\t1.wav\t0.5\tnull\tNA\ts", "faulty row", "line 3 has 6 fields, the header has 5"),
        (b"", "faulty row", "line 3 has 1 fields"),
        (b"\t1.wav\t0.5\tnull\ts", "faulty row", "line 3 has no id"),
        (b"u1\t1.wav\tlong\tnull\ts", "faulty row", "could not convert string to float: 'long'"),
        (b"u1\t1.wav\t-1\tnull\ts", "faulty row", "duration '-1', expected seconds above 0"),
        (b"u1\t1.wav\tnan\tnull\ts", "faulty row", "duration 'nan'"),
        (b"u1\t1.wav\t0.5\tnu\xdfll\ts", "faulty row", "line 3 is not UTF-8 (byte 0xDF)"),
        (b"u1\t1.wav\t0.5\tnu\0ll\ts", "faulty row", "line 3 holds a NUL"),
        (b"u1\t1.wav\t0.5\tnu\rll\ts", "faulty row", "line 3 holds a carriage return"),
        (b"u0\t1.wav\t0.5\tnull\ts", "duplicate id", "line 3, utterance 'u0': the id is already that of"),
        (b"u1\t9.wav\t0.5\tnull\ts", "missing audio", "9.wav: no such audio file"),
        (b"u1\t1.wav\t0.7\tnull\ts", "duration", "duration is 0.7 s, but"),
        (b"u1\t1.wav\t0.5\t\ts", "empty transcript", "line 3, utterance 'u1': the transcript is empty"),
        (b"u1\t1.wav\t0.5\tnull 7\ts", "odd characters", "holds '7'"),
        (b"u1\t1.wav\t0.5\tnullllll\ts", "too long for CTC", "8 target units need 13 encoder frames, 0.5 s"),
        (b"u1\t1.wav\t0.5\tA nul nul nul nul\ts", "transcript too long", "18 target units with the end of sentence"),
    ],
)  # fmt: skip
def test_one_fault_among_sound_rows(manifest, line, kind, words):
    replace(manifest, LINE, line)
    (fault,) = faults_of(manifest, ctc_subsampling=4 if "CTC" in kind else 0, max_target_positions=17)
    assert fault.kind == kind
    assert words in fault.message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no column id"),
        (b"id\taudio\n", "no column duration, text, speaker"),
        (b"id\taudio\tduration\ttext\tspeaker\n", "a header and no utterance"),
    ],
)
def test_what_is_no_manifest(manifest, content, words):
    manifest.write_bytes(content)
    (fault,) = faults_of(manifest)
    assert fault.kind == "not a manifest"
    assert words in fault.message


def test_line_ends_and_quotes_are_no_fault(manifest):
    replace(manifest, b"null NA", b'say "hi"')
    manifest.write_bytes(b"\xef\xbb\xbf" + manifest.read_bytes().replace(b"\n", b"\r\n"))
    assert not faults_of(manifest)


def test_limits_of_the_audio(manifest):
    assert not faults_of(manifest, max_source_positions=48)
    assert [fault.kind for fault in faults_of(manifest, max_source_positions=47)] == ["audio too long"] * 3


def test_the_same_id_in_two_manifests(manifest):
    ids = DuplicateIds()
    other = manifest.with_name("valid.tsv")
    other.write_bytes(manifest.read_bytes())
    assert not faults_of(manifest, ids)
    assert [fault.kind for fault in faults_of(other, ids)] == ["duplicate id"] * 3


def test_cached_features_are_looked_at(manifest):
    folder = extract_features(manifest)
    _map_shard.cache_clear()
    assert not faults_of(manifest)
    shard = folder / "shard-00000.npy"
    features = np.load(shard)
    assert read_manifest(manifest).numbers("offset").tolist() == [0, 48, 96]
    features[50] = np.nan
    np.save(shard, features[:-1])
    _map_shard.cache_clear()
    found = [(fault.kind, fault.subject) for fault in faults_of(manifest)]
    assert found == [("cached features", "u1"), ("cached features", "u2")]


def test_faults_are_counted_by_subject_and_kind(tmp_path):
    faults = [Fault("not mono", "a", "é\n"), Fault("silence", "a", ""), Fault("silence", "b", "")]
    write_faults(tmp_path / "faults.jsonl", faults)
    assert list(read_faults(tmp_path / "faults.jsonl")) == faults
    counts = FaultCounts(faults)
    counts.add(faults[:1])
    assert len(counts.subjects) == 2
    assert counts.kinds == {"not mono": 2, "silence": 2}
    (tmp_path / "faults.jsonl").write_text("nonsense\n")
    with pytest.raises(InputError, match=r"faults\.jsonl: not a list of faults"):
        list(read_faults(tmp_path / "faults.jsonl"))


@pytest.mark.parametrize(("budget", "stops"), [(2, True), (3, False)])
def test_the_budget_counts_utterances_and_all_faults_are_listed(manifest, monkeypatch, capsys, budget, stops):
    """u0 has two faults, u1 one, and preparation left out one utterance more."""
    replace(manifest, b"0.wav\t0.5\tnull", b"none.wav\t0.5\tnull 7")
    replace(manifest, LINE, b"u1\t1.wav\t0.5\tnull")
    write_faults(manifest.with_name("train.dropped.jsonl"), [Fault("silence", "u9", "nine.flac: digital silence")])
    monkeypatch.setattr(sys, "argv", ["validate.py", str(manifest.parent), "--max-bad", str(budget)])
    validate = script("validate")
    if stops:
        with pytest.raises(InputError, match="3 utterances or files have a fault, --max-bad allows 2"):
            validate.main()
    else:
        validate.main()
    output = capsys.readouterr().out
    listed = [line.partition(":")[0] for line in output.partition("\n\n")[0].splitlines()]
    assert listed == ["silence", "faulty row", "missing audio", "odd characters"]
    assert "3 utterances or files with a fault" in output
    assert ("go on" in output) != stops


def test_without_a_vocabulary_the_rest_is_still_checked(manifest, monkeypatch, capsys):
    manifest.with_name("dict.txt").unlink()
    replace(manifest, b"0.wav", b"none.wav")
    monkeypatch.setattr(sys, "argv", ["validate.py", str(manifest.parent)])
    with pytest.raises(InputError, match="2 utterances or files"):
        script("validate").main()
    output = capsys.readouterr().out
    assert "no vocabulary: " in output
    assert "missing audio: " in output


def test_limits_are_those_of_the_task():
    from speech_mt.tasks.speech_config import SpeechManifestConfig

    task = SpeechManifestConfig()
    limits = TargetLimits()
    for name in ("sample_rate", "ctc_subsampling", "max_source_positions", "max_target_positions"):
        assert getattr(task, name) == getattr(limits, name)
