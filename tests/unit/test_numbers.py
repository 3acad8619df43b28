"""The built-in corpus: splits are disjoint and learnable, the same every time, and speech is written once."""

from dataclasses import replace

import numpy as np
import pytest
import soundfile

from speech_mt.data import numbers
from speech_mt.data.manifest import read_manifest
from speech_mt.data.numbers import (
    VOICES,
    SplitSizes,
    draw_numbers,
    number_words,
    plan_spoken_numbers,
    speak,
    speak_all,
    split_numbers,
    write_manifests,
    write_number_pairs,
    write_transcripts,
)

pytest.importorskip("num2words", reason="the demo extra is not installed: pip install 'speech_mt[demo]'")
pytest.importorskip("py_nanotts", reason="the demo extra is not installed: pip install 'speech_mt[demo]'")


def test_number_words():
    assert number_words(21, "de") == "einundzwanzig"
    assert number_words(21, "en") == "twenty one"
    assert (
        number_words(1_234_567, "de")
        == "eine million zweihundertvierunddreißigtausendfünfhundertsiebenundsechzig"
    )
    assert number_words(1_234_567, "en") == (
        "one million two hundred and thirty four thousand five hundred and sixty seven"
    )


def test_drawn_numbers_are_distinct_and_of_every_length():
    drawn = draw_numbers(12_000, seed=1)
    assert len(set(drawn)) == 12_000
    assert drawn[0] == 0
    lengths = np.bincount([len(str(number)) for number in drawn])
    assert len(lengths) == 9  # up to eight digits
    assert (lengths[4:] > 1_500).all()
    assert drawn == draw_numbers(12_000, seed=1)
    assert drawn != draw_numbers(12_000, seed=2)


def test_no_number_is_in_two_splits():
    sizes = SplitSizes(train=11_100, valid=300, test=600)
    drawn = draw_numbers(sizes.total, seed=1)
    splits = split_numbers(drawn, sizes, seed=1)
    assert {split: len(dealt) for split, dealt in splits.items()} == {
        "train": 11_100,
        "valid": 300,
        "test": 600,
    }
    assert sorted(splits["train"] + splits["valid"] + splits["test"]) == drawn
    assert 0 in splits["train"]


def test_written_test_sentences_are_new_but_their_words_are_not(tmp_path):
    sizes = SplitSizes(train=1_000, valid=50, test=100)
    write_number_pairs(tmp_path, ("de", "en"), sizes, seed=1)
    text = {
        (split, language): (tmp_path / f"{split}.{language}").read_text(encoding="utf-8").splitlines()
        for split in ("train", "valid", "test")
        for language in ("de", "en")
    }
    for language in ("de", "en"):
        assert [len(text[split, language]) for split in ("train", "valid", "test")] == [1_000, 50, 100]
        assert not set(text["train", language]) & set(text["test", language] + text["valid", language])
    words = {split: set(" ".join(text[split, "en"]).split()) for split in ("train", "test")}
    assert words["test"] <= words["train"]
    splits = split_numbers(draw_numbers(sizes.total, seed=1), sizes, seed=1)
    assert text["test", "de"] == [number_words(number, "de") for number in splits["test"]]  # line k is line k


def test_spoken_plan():
    sizes = SplitSizes(train=750, valid=50, test=200)
    plan = plan_spoken_numbers(sizes, seed=1)
    assert plan == plan_spoken_numbers(sizes, seed=1)
    assert len({utterance.id for utterance in plan}) == len(plan) == 2_000
    said = {split: {u.number for u in plan if u.split == split} for split in ("train", "valid", "test")}
    assert [len(said[split]) for split in said] == [750, 50, 200]
    assert said["train"] | said["valid"] | said["test"] == set(range(1_000))
    assert {u.speaker for u in plan if u.split == "test"} == set(VOICES)
    assert len({(u.speed, u.pitch, u.volume) for u in plan}) > 1_900
    words = {split: {w for u in plan if u.split == split for w in u.text.split()} for split in said}
    assert words["test"] <= words["train"]


def test_speech_is_16_khz_mono_follows_the_speed_and_is_not_made_twice(tmp_path):
    plain = replace(plan_spoken_numbers(SplitSizes(1, 0, 0), seed=1)[0], text="three hundred", speed=1.0)
    assert plain.path(tmp_path) == tmp_path / "train/1/0/1-0-0000.flac"
    fast = replace(plain, number=101, speed=1.3)
    for utterance in (plain, fast):
        speak(utterance, tmp_path)
    info = soundfile.info(plain.path(tmp_path))
    assert (info.samplerate, info.channels, info.format, info.subtype) == (16_000, 1, "FLAC", "PCM_16")
    assert soundfile.info(fast.path(tmp_path)).frames < 0.9 * info.frames
    samples, _ = soundfile.read(plain.path(tmp_path))
    assert 0.05 < np.abs(samples).max() < 0.99  # neither silent nor clipped
    plain.path(tmp_path).write_bytes(b"kept")
    speak(plain, tmp_path)
    assert plain.path(tmp_path).read_bytes() == b"kept"


def test_manifests_transcripts_and_dictionary_agree(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers.os, "sched_getaffinity", lambda _: {0})
    sizes = SplitSizes(train=4, valid=1, test=1)
    plan = plan_spoken_numbers(sizes, seed=1)
    speak_all(plan, tmp_path / "audio")
    write_transcripts(plan, tmp_path / "audio")
    write_manifests(plan, tmp_path)
    for split, size in (("train", 8), ("valid", 2), ("test", 2)):
        manifest = read_manifest(tmp_path / f"{split}.tsv")
        assert len(manifest) == size
        for row in range(size):
            audio = manifest.audio_path(row)
            assert soundfile.info(audio).duration == manifest.duration[row]
            transcript = audio.with_name(f"{manifest.field(row, 'speaker')}-0.trans.txt").read_text()
            assert f"{manifest.field(row, 'id')} {manifest.field(row, 'text')}\n" in transcript
    symbols = [line.split()[0] for line in (tmp_path / "dict.txt").read_text().splitlines()]
    train = "".join(read_manifest(tmp_path / "train.tsv").column("text"))
    assert sorted(symbols) == sorted(set(train))
