"""The built-in corpus: number words, German and English, written and spoken. It needs no download.

Small enough to learn in minutes, and enough of a task to tell a trained model from a stalled one: a German
number is one long word with its units before its tens, so translating it takes splitting and reordering.
"""

from __future__ import annotations

import os
import random
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import soundfile
from tqdm import tqdm

from speech_mt.data.manifest import write_manifest
from speech_mt.data.stage import atomic_path
from speech_mt.data.vocabulary import character_counts, write_dictionary
from speech_mt.errors import InputError

SAMPLE_RATE = 16_000  # Hz, what the synthesiser makes
VOICES = {"1": "en-GB", "2": "en-US"}  # speaker: voice; LibriSpeech, too, names its speakers by number


@dataclass(frozen=True)
class SplitSizes:
    """How many numbers each split has; no number is in two of them."""

    train: int
    valid: int
    test: int

    @property
    def total(self) -> int:
        return self.train + self.valid + self.test


def number_words(number: int, language: str) -> str:
    """Lower-case words without punctuation: 21 is ``einundzwanzig`` in ``de``, ``twenty one`` in ``en``."""
    try:
        from num2words import num2words
    except ImportError:
        raise InputError("num2words is not installed: pip install 'speech_mt[demo]'") from None
    return num2words(number, lang=language).lower().replace("-", " ").replace(",", "")


def draw_numbers(count: int, seed: int) -> list[int]:
    """``count`` distinct numbers, 0 among them, in order; a draw is below 10^3, 10^4, ... or 10^8 alike."""
    source = random.Random(seed)
    numbers = {0}
    while len(numbers) < count:
        numbers.add(source.randrange(10 ** source.randint(3, 8)))
    return sorted(numbers)


def split_numbers(numbers: Sequence[int], sizes: SplitSizes, seed: int) -> dict[str, list[int]]:
    """Deal distinct ``numbers`` at random into ``train``, ``valid`` and ``test``.

    Zero always goes to ``train``: no other number has its word, so no model could learn it from them.
    """
    shuffled = [number for number in numbers if number]
    random.Random(seed).shuffle(shuffled)
    held_out = sizes.test + sizes.valid
    return {
        "train": [0, *shuffled[held_out : held_out + sizes.train - 1]],
        "valid": shuffled[sizes.test : held_out],
        "test": shuffled[: sizes.test],
    }


def write_number_pairs(folder: Path, languages: Sequence[str], sizes: SplitSizes, seed: int) -> str:
    """Write ``<folder>/<split>.<language>``, a number a line, and return a line about it. 2 s for 12,000."""
    splits = split_numbers(draw_numbers(sizes.total, seed), sizes, seed)
    for split, numbers in splits.items():
        for language in languages:
            with atomic_path(folder / f"{split}.{language}") as temporary:
                words = (number_words(number, language) for number in numbers)
                temporary.write_text("".join(f"{line}\n" for line in words), encoding="utf-8")
    return f"{sizes.total:,} distinct numbers in {' and '.join(languages)}"


@dataclass(frozen=True)
class SpokenNumber:
    """One utterance to be made. ``speed`` and ``pitch`` are factors, ``volume`` a share of full scale."""

    split: str
    speaker: str
    number: int
    text: str
    speed: float
    pitch: float
    volume: float

    @property
    def id(self) -> str:
        """``<speaker>-<chapter>-<utterance>``, as in LibriSpeech; a chapter is a hundred numbers."""
        return f"{self.speaker}-{self.number // 100}-{self.number:04d}"

    def path(self, audio: Path) -> Path:
        return audio / self.split / self.speaker / str(self.number // 100) / f"{self.id}.flac"


def plan_spoken_numbers(sizes: SplitSizes, seed: int) -> list[SpokenNumber]:
    """English numbers from 0 up, each said once by every voice at a random speed, pitch and volume."""
    source = random.Random(seed)
    return [
        SpokenNumber(
            split,
            speaker,
            number,
            number_words(number, "en"),
            speed=round(source.uniform(0.8, 1.3), 2),
            pitch=round(source.uniform(0.9, 1.35), 2),
            volume=round(source.uniform(0.1, 0.4), 2),
        )
        for split, numbers in split_numbers(range(sizes.total), sizes, seed).items()
        for speaker in VOICES
        for number in sorted(numbers)
    ]


def speak(utterance: SpokenNumber, audio: Path) -> None:
    """Synthesise one utterance as 16 kHz mono 16-bit FLAC, unless its file is there.

    The synthesiser is not quite reproducible: of 2,000 utterances made twice, 68 differed, by up to 0.13 % of
    full scale; none in length.
    """
    path = utterance.path(audio)
    if path.exists():
        return
    from py_nanotts import NanoTTS

    samples = NanoTTS().speak(
        utterance.text,
        voice=VOICES[utterance.speaker],
        speed=utterance.speed,
        pitch=utterance.pitch,
        volume=utterance.volume,
    )
    with atomic_path(path) as temporary:
        soundfile.write(
            temporary, np.frombuffer(samples, dtype="<i2"), SAMPLE_RATE, format="FLAC", subtype="PCM_16"
        )


def speak_all(utterances: Sequence[SpokenNumber], audio: Path) -> str:
    """Synthesise what is not there yet, on every core; return a line about it. 11 s for 2,000 on two cores.

    Raises:
        InputError: py-nanotts cannot be imported.
    """
    try:
        import py_nanotts  # noqa: F401
    except ImportError as error:
        raise InputError(f"py-nanotts cannot be used ({error}): pip install 'speech_mt[demo]'") from None
    workers = len(os.sched_getaffinity(0))
    # Ctrl-C is for this process alone, which then ends its workers.
    with get_context("spawn").Pool(workers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        spoken = pool.imap_unordered(partial(speak, audio=audio), utterances, chunksize=8)
        for _ in tqdm(spoken, "  speaking", len(utterances), leave=False, mininterval=1, unit=" utterances"):
            pass
    return f"{len(utterances):,} utterances in {audio}"


def write_transcripts(utterances: Sequence[SpokenNumber], audio: Path) -> str:
    """Write LibriSpeech's ``<speaker>-<chapter>.trans.txt``, lines of ``id text``; return a line about it."""
    chapters: dict[Path, list[str]] = defaultdict(list)
    for utterance in utterances:
        chapter = utterance.id.rpartition("-")[0]
        transcripts = utterance.path(audio).with_name(f"{chapter}.trans.txt")
        chapters[transcripts].append(f"{utterance.id} {utterance.text}\n")
    for path, lines in chapters.items():
        with atomic_path(path) as temporary:
            temporary.write_text("".join(lines), encoding="utf-8")
    return f"{len(utterances):,} transcripts in {audio}"


def write_manifests(utterances: Sequence[SpokenNumber], folder: Path) -> str:
    """Write ``train.tsv``, ``valid.tsv`` and ``test.tsv``, manifests of ``folder/audio``, and ``dict.txt``.

    The dictionary holds the characters of the training transcripts. Returns a line about it all.
    """
    seconds = 0.0
    for split in ("train", "valid", "test"):
        rows = []
        for utterance in (utterance for utterance in utterances if utterance.split == split):
            path = utterance.path(folder / "audio")
            duration = soundfile.info(path).duration
            seconds += duration
            rows.append(
                {
                    "id": utterance.id,
                    "audio": path.relative_to(folder),
                    "duration": duration,
                    "text": utterance.text,
                    "speaker": utterance.speaker,
                }
            )
        write_manifest(folder / f"{split}.tsv", rows)
    train = (utterance.text for utterance in utterances if utterance.split == "train")
    write_dictionary(folder / "dict.txt", character_counts(train))
    count = len(utterances)
    return f"{count:,} utterances, {seconds / 60:.1f} minutes, {seconds / count:.2f} s on average"
