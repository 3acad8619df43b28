"""Transcription of files with models that hear tones: nothing is lost, doubled or out of order."""

import json
import math
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
from omegaconf import OmegaConf

import speech_mt
from speech_mt.data.vocabulary import character_counts, write_dictionary
from speech_mt.errors import InputError
from speech_mt.inference.transcriber import Transcriber
from speech_mt.tasks.speech import SpeechManifestTask
from speech_mt.tasks.speech_config import SpeechManifestConfig

TONES = {"a": 500, "b": 1000, "c": 2000, "|": 4000}  # Hz; the word boundary is heard too
RATE, STRIDE = 16000, 4
SCRIPT = Path(__file__).parents[2] / "scripts" / "transcribe.py"


def say(text, rate=RATE):
    """A tone of 0.12 s and a pause of 0.08 s for each character, between pauses of half a second."""
    parts = [np.zeros(rate // 2)]
    for character in text.replace(" ", "|"):
        tone = 0.3 * np.sin(2 * np.pi * TONES[character] * np.arange(int(0.12 * rate)) / rate)
        parts += [tone, np.zeros(int(0.08 * rate))]
    return np.concatenate([*parts, np.zeros(rate // 2)])


@pytest.fixture
def task(tmp_path):
    write_dictionary(tmp_path / "dict.txt", character_counts(["a b c"]))
    resolved = {"seed": 1, "train_subset": "train", "post_process": None, "features_normalization": "none"}
    cfg = OmegaConf.structured(SpeechManifestConfig(data=str(tmp_path)))
    return SpeechManifestTask.setup_task(OmegaConf.merge(cfg, resolved))


class Ear:
    """Every fourth frame as the id of its tone, 0 where it is quiet, and within ``deaf`` frames of a cut."""

    def __init__(self, dictionary, deaf=0):
        from torchaudio.compliance.kaldi import get_mel_banks

        banks, _ = get_mel_banks(80, 512, float(RATE), 20.0, 0.0, 100.0, -500.0, 1.0)
        bins = {character: int(banks[:, round(hertz * 512 / RATE)].argmax()) for character, hertz in TONES.items()}
        self.ids = torch.zeros(80, dtype=torch.int64)
        for character, middle in bins.items():
            self.ids[middle - 2 : middle + 3] = dictionary.index(character)
        self.deaf = deaf

    def __call__(self, features):
        loudest, bins = features[::STRIDE].max(dim=1)
        ids = torch.where(loudest > 10, self.ids[bins], 0)
        if self.deaf:
            ids[: self.deaf] = ids[-self.deaf :] = 0
        return ids


class CTCModel(torch.nn.Module):
    encoder = SimpleNamespace(subsample=SimpleNamespace(stride=STRIDE))

    def __init__(self, dictionary, deaf=0, limit=6000):
        super().__init__()
        self.hear, self.symbols, self.limit = Ear(dictionary, deaf), len(dictionary), limit
        self.longest = 0

    def max_positions(self):
        return self.limit

    def forward(self, src_tokens, src_lengths):
        self.longest = max(self.longest, int(src_lengths.max()))
        heard = [self.hear(features[:length]) for features, length in zip(src_tokens, src_lengths, strict=True)]
        logits = torch.nn.utils.rnn.pad_sequence([20.0 * torch.nn.functional.one_hot(h, self.symbols) for h in heard])
        lengths = torch.tensor([len(h) for h in heard])
        return {"encoder_out": logits, "padding_mask": torch.arange(len(logits)) >= lengths[:, None]}

    def get_normalized_probs(self, net_output, log_probs):
        return net_output["encoder_out"].log_softmax(-1)


@pytest.fixture
def transcriber(task):
    def build(**options):
        return Transcriber(task, CTCModel(task.dictionary, **options), torch.device("cpu"))

    return build


def write(path, text, rate=RATE, channels=1):
    soundfile.write(path, np.stack([say(text, rate)] * channels, axis=1), rate)
    return str(path)


TEXTS = ["a cab", "b", "cc aa", "abc abc abc", "ba"]
LONG = " ".join(["abc", "aaa", "c", "b", "a", "abc", "abc", "abc", "cab", "bb", "b", "a", "a"] * 4)  # 33 s


def test_texts_come_in_the_order_of_the_files(transcriber, tmp_path):
    files = [write(tmp_path / f"{i}.flac", text) for i, text in enumerate(TEXTS)]
    for batch_size in (1, 2, 8):
        assert transcriber().transcribe(files, batch_size=batch_size) == TEXTS
    assert transcriber().transcribe([]) == []


@pytest.mark.parametrize("deaf", [0, 10])
@pytest.mark.parametrize("chunk_seconds", [3.0, 4.37, 10.0])
def test_chunks_lose_and_double_no_word(transcriber, tmp_path, deaf, chunk_seconds):
    """Also where the model hears nothing within 0.4 s of a cut, half of the overlap being more."""
    file = write(tmp_path / "long.wav", LONG)
    model = transcriber(deaf=deaf)
    assert model.transcribe([file], chunk_seconds=chunk_seconds, overlap_seconds=1.0) == [LONG]
    assert model.model.longest <= 100 * chunk_seconds


def test_too_little_overlap_loses_words(transcriber, tmp_path):
    """The opposite of the above, which shows that it can fail."""
    file = write(tmp_path / "long.wav", LONG)
    assert transcriber(deaf=10).transcribe([file], chunk_seconds=4.0, overlap_seconds=0.2) != [LONG]


def test_a_model_s_limit_cuts_too(transcriber, tmp_path):
    model = transcriber(limit=500)
    assert model.transcribe([write(tmp_path / "long.wav", LONG)]) == [LONG]
    assert model.model.longest <= 500


def test_words_have_the_times_they_were_said_at(transcriber, tmp_path):
    (short, long) = (write(tmp_path / "short.wav", "ab c"), write(tmp_path / "long.wav", LONG))
    first, second = transcriber().transcripts([short, long], word_timestamps=True, chunk_seconds=5.0)
    assert [word.word for word in first.words] == ["ab", "c"]
    # 0.5 s of silence, 0.2 s a character, of which 0.12 s sound; frames of the model are 0.04 s apart
    times = [(word.start, word.end) for word in first.words]
    assert np.allclose(times, [(0.5, 0.82), (1.1, 1.22)], atol=0.05)
    assert " ".join(word.word for word in second.words) == second.text == LONG
    places = np.cumsum([0, *[len(word) + 1 for word in LONG.split()[:-1]]])
    assert np.allclose([word.start for word in second.words], 0.5 + 0.2 * places, atol=0.05)


def test_any_rate_and_channels_with_a_note(transcriber, tmp_path):
    files = [write(tmp_path / "a.wav", "ab", 44100, channels=2), write(tmp_path / "b.ogg", "ba", 16000)]
    first, second = transcriber().transcripts(files)
    assert (first.text, second.text) == ("ab", "ba")
    assert first.notes == ("2 channels averaged", "resampled from 44100 Hz")
    assert second.notes == ()
    assert first.seconds == pytest.approx(1.4, abs=0.001)


@pytest.fixture
def bad_files(tmp_path):
    (tmp_path / "text.wav").write_text("no audio")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0), RATE)
    soundfile.write(tmp_path / "click.wav", np.zeros(100), RATE)
    return [str(tmp_path / name) for name in ("text.wav", "empty.wav", "click.wav", "none.wav")]


def test_unreadable_files_do_not_stop_the_others(transcriber, tmp_path, bad_files):
    good = [write(tmp_path / f"{i}.wav", text) for i, text in enumerate(TEXTS)]
    files = [*bad_files[:2], *good[:2], *bad_files[2:], *good[2:]]
    done = list(transcriber().transcripts(files, batch_size=3))
    assert [transcript.file for transcript in done] == files
    assert [transcript.text for transcript in done if transcript.error is None] == TEXTS
    errors = [transcript.error for transcript in done if transcript.error]
    for error, name in zip(errors, bad_files, strict=True):
        assert name in error
    with pytest.raises(InputError, match=r"text\.wav"):
        transcriber().transcribe(files)


def test_a_path_is_not_a_list(transcriber):
    with pytest.raises(InputError, match=r"put a\.wav into a list"):
        transcriber().transcribe("a.wav")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size 0: has to be at least 1"),
        ({"chunk_seconds": math.nan}, "chunks of nan s"),
        ({"chunk_seconds": 0}, "chunks of 0 s"),
        ({"overlap_seconds": math.inf}, "that overlap by inf s"),
        ({"beam": 0}, "--beam 0: has to be at least 1"),
        ({"bem": 3}, "no option bem of the search: did you mean beam"),
    ],
)
def test_numbers_without_a_meaning_are_refused(transcriber, options, message):
    with pytest.raises(InputError, match=message):
        transcriber().transcribe([], **options)


class TestAttention:
    """A task whose beam search says what the same ear hears: without frames to join."""

    @pytest.fixture
    def transcriber(self, task, monkeypatch):
        hear = Ear(task.dictionary)

        def inference_step(generator, models, sample):
            source = sample["net_input"]
            heard = [hear(x[:n]).unique_consecutive() for x, n in zip(*source.values(), strict=True)]
            return [[{"tokens": ids[ids != 0]}] for ids in heard]

        monkeypatch.setattr(task, "build_generator", lambda models, options: None)
        monkeypatch.setattr(task, "inference_step", inference_step)
        return Transcriber(task, SimpleNamespace(max_positions=lambda: (6000, 1024)), torch.device("cpu"))

    def test_it_is_cut_where_nothing_is_said(self, transcriber, tmp_path):
        text = " ".join(["ab", "cab", "b", "ab", "ab"] * 9)
        sound = np.concatenate([say(word) for word in text.split()])  # a second between words
        soundfile.write(tmp_path / "long.wav", sound, RATE)
        (found,) = transcriber.transcribe([tmp_path / "long.wav"], chunk_seconds=9.0)
        assert found.replace(" ", "") == text.replace(" ", "")

    def test_word_times_need_ctc(self, transcriber):
        with pytest.raises(InputError, match="word timestamps need a CTC model"):
            next(transcriber.transcripts(["a.wav"], word_timestamps=True))


class TestScript:
    @pytest.fixture
    def run(self, transcriber, monkeypatch, capsys):
        def run(*arguments):
            monkeypatch.setattr(speech_mt, "load", lambda *args, **options: transcriber())
            monkeypatch.setattr(sys, "argv", ["transcribe.py", "checkpoint.pt", *arguments])
            with pytest.raises(SystemExit) as exit_code:
                runpy.run_path(str(SCRIPT), run_name="__main__")
            return (exit_code.value.code, *capsys.readouterr())

        return run

    def test_text_keeps_a_line_for_each_file(self, run, tmp_path, bad_files):
        files = [write(tmp_path / "1.wav", "a cab"), bad_files[0], write(tmp_path / "2.wav", "b", 8000)]
        code, out, err = run(*files)
        assert (code, out) == (1, "a cab\n\nb\n")
        assert err.startswith(f"error: {bad_files[0]}: not an audio file")
        assert f"{files[2]}: resampled from 8000 Hz\n" in err
        assert err.endswith("1 of 3 files could not be transcribed\n")
        assert run(files[0])[0] == 0

    def test_tsv_is_what_score_wer_reads(self, run, tmp_path):
        from speech_mt.scoring.hypotheses import read_parallel
        from speech_mt.scoring.wer import score_wer

        files = [write(tmp_path / f"u{i}.wav", text) for i, text in enumerate(TEXTS)]
        code, out, _ = run(*files, "--format", "tsv")
        assert code == 0
        (tmp_path / "out.tsv").write_text(out)
        rows = [f"u{i}\t{text}" for i, text in reversed(list(enumerate(TEXTS)))]
        (tmp_path / "references.tsv").write_text("\n".join(["id\ttext", *rows]) + "\n")
        report = score_wer(read_parallel(tmp_path / "out.tsv", [tmp_path / "references.tsv"]))
        assert (report.words.errors, report.words.reference) == (0, 9)

    def test_word_times_in_both_formats(self, run, tmp_path):
        file = write(tmp_path / "u.wav", "a b")
        code, out, _ = run(file, "--format", "tsv", "--word-timestamps")
        header, row = (line.split("\t") for line in out.splitlines())
        assert header == ["id", "audio", "duration", "text", "words"]
        assert row[:4] == ["u", file, "1.600", "a b"]
        words = [word.rpartition(":") for word in row[4].split()]
        assert [word for _, _, word in words] == ["a", "b"]
        entry = json.loads(run(file, "--format", "jsonl", "--word-timestamps")[1])
        assert (entry["id"], entry["text"], entry["error"]) == ("u", "a b", None)
        times = [f"{word['start']:.2f}-{word['end']:.2f}" for word in entry["words"]]
        assert times == [span for span, _, _ in words]
        assert "words" not in json.loads(run(file, "--format", "jsonl")[1])
        assert run(file, "--word-timestamps")[0] == 2

    def test_files_of_one_name_keep_their_paths_for_ids(self, run, tmp_path):
        (tmp_path / "other").mkdir()
        files = [write(tmp_path / name, "a") for name in ("u.wav", "other/u.wav", "v.wav")]
        rows = run(*files, "--format", "tsv")[1].splitlines()[1:]
        assert [row.split("\t")[0] for row in rows] == [*files[:2], "v"]
