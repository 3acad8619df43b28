"""LibriSpeech (Panayotov et al., ICASSP 2015) in its own layout, ``subset/speaker/chapter``.

A chapter's folder holds ``speaker-chapter-utterance.flac`` files and ``speaker-chapter.trans.txt``, lines of
an utterance's id and its words in capitals. What the README, SPEAKERS and other lists say is not needed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from speech_mt.data.download import download, unpack
from speech_mt.data.validation import Fault, Utterance, check_audio, check_transcript, decode_line
from speech_mt.errors import InputError

SAMPLE_RATE = 16000
ALPHABET = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ' ")
ADDRESS = "https://www.openslr.org/resources/12"
CHECKSUMS = {  # SHA-256, those of torchaudio.datasets.LIBRISPEECH
    "dev-clean": "76f87d090650617fca0cac8f88b9416e0ebf80350acb97b343a85fa903728ab3",
    "dev-other": "12661c48e8c3fe1de2c1caa4c3e135193bfb1811584f11f569dd12645aa84365",
    "test-clean": "39fde525e59672dc6d1551919b1478f724438a95aa55f874b576be21967e6c23",
    "test-other": "d09c181bba5cf717b3dee7d4d592af11a3ee3a09e08ae025c5506f6ebe961c29",
    "train-clean-100": "d4ddd1d5a6ab303066f14971d768ee43278a5f2a0aa43dc716b0e64ecbbbf6e2",
    "train-clean-360": "146a56496217e96c14334a160df97fffedd6e0a04e66b9c5af0d40be3c792ecf",
    "train-other-500": "ddb22f27f96ec163645d53215559df6aa36515f26e01dd70798188350adcb6d2",
}


def download_subset(root: Path, subset: str, address: str = ADDRESS) -> None:
    """Fetch and unpack ``root/subset`` unless it is there; the archive stays beside ``root``.

    Args:
        root: the corpus's folder, ``LibriSpeech`` in the archives.
        subset: one of :data:`CHECKSUMS`.
        address: OpenSLR's, or that of a mirror of its resource 12.

    Raises:
        InputError: there is no such subset, or see :func:`download` and :func:`unpack`.
    """
    if (root / subset).exists():
        return
    if subset not in CHECKSUMS:
        raise InputError(f"{subset}: not a subset that OpenSLR has; these are {', '.join(CHECKSUMS)}")
    name = f"{subset}.tar.gz"
    archive = download(f"{address}/{name}", root.parent / name, f"sha256:{CHECKSUMS[subset]}")
    unpacked = unpack(archive, root.parent / f".{subset}.unpacked")
    root.mkdir(exist_ok=True)
    for path in sorted((unpacked / "LibriSpeech").iterdir(), key=lambda path: path.name == subset):  # it comes last
        if not (root / path.name).exists():
            os.replace(path, root / path.name)
    shutil.rmtree(unpacked)


def speakers(root: Path, subset: str) -> list[Path]:
    """The folders of a subset's speakers, by number; :class:`InputError` if there is none."""
    folder = root / subset
    if not folder.is_dir():
        found = ", ".join(sorted(path.name for path in root.glob("*/"))) or "none"
        raise InputError(f"{folder}: no such subset; in {root} there are: {found}")
    if not (found := _folders(folder)):
        raise InputError(f"{folder}: holds no folder of a speaker; is {root} the folder LibriSpeech itself?")
    return found


def read_speaker(folder: Path) -> tuple[list[Utterance], list[Fault]]:
    """Check all utterances of a speaker; return the sound ones, in order, and every fault of the others."""
    utterances: list[Utterance] = []
    faults: list[Fault] = []
    for chapter in _folders(folder):
        candidates, found = read_transcripts(chapter)
        faults += found
        for utterance in candidates:
            duration, found = check_audio(utterance.id, utterance.audio, SAMPLE_RATE)
            found += check_transcript(utterance, set(utterance.text) - ALPHABET)
            faults += found
            if not found:
                utterances.append(Utterance(utterance.id, utterance.audio, utterance.text, utterance.where, duration))
    return utterances, faults


def read_transcripts(chapter: Path) -> tuple[list[Utterance], list[Fault]]:
    """The utterances of a chapter's transcripts, in their order, and the faults of all others.

    Missing and repeated transcripts and lines that are no transcript are faults; audio is not looked at.
    """
    faults: list[Fault] = []
    candidates: dict[str, list[Utterance]] = {}
    for path in sorted(chapter.glob("*.trans.txt")):
        try:
            for entry in _read_lines(path, chapter):
                if isinstance(entry, Fault):
                    faults.append(entry)
                else:
                    candidates.setdefault(entry.id, []).append(entry)
        except OSError as error:
            faults.append(Fault("unreadable transcripts", str(path), f"{path}: {error.strerror}"))
    for identifier, found in candidates.items():
        if len(found) > 1:  # which of them is right?
            places = ", ".join(utterance.where for utterance in found)
            faults.append(Fault("duplicate id", identifier, f"{places}: {len(found)} transcripts of one id; keep one"))
    expected = f"{chapter.parent.name}-{chapter.name}.trans.txt"
    faults += [
        Fault("missing transcript", audio.stem, f"{audio}: has no line in {expected}")
        for audio in sorted(chapter.glob("*.flac"))
        if audio.stem not in candidates
    ]
    return [found[0] for found in candidates.values() if len(found) == 1], faults


def _read_lines(path: Path, chapter: Path) -> Iterator[Utterance | Fault]:
    prefix = f"{chapter.parent.name}-{chapter.name}-"
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"{path} line {number}"
            try:
                identifier, _, text = decode_line(raw).rstrip(" ").partition(" ")
            except ValueError as error:
                yield Fault("not a transcript", place, f"{place}: {error}; correct or delete the line")
                continue
            if not identifier and not text:
                continue
            if not identifier.startswith(prefix) or not identifier.isprintable() or "/" in identifier:
                message = f"{place}: begins with {identifier!r}, expected an id such as {prefix}0000"
                yield Fault("not a transcript", place, message)
                continue
            where = f"{place}, utterance {identifier!r}"
            yield Utterance(identifier, chapter / f"{identifier}.flac", text.strip(" "), where)


def _folders(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: (len(path.name), path.name))
