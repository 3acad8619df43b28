"""From a parallel text to fairseq's binarised data: check, learn one joint vocabulary, encode, binarise."""

from __future__ import annotations

import hashlib
import json
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from sentencepiece import SentencePieceProcessor
from tqdm import tqdm

from speech_mt.data.parallel_map import bounded
from speech_mt.data.stage import atomic_path, run_stage
from speech_mt.data.text import ParallelReport, check_parallel, count_lines, overlap
from speech_mt.data.vocabulary import (
    UNKNOWN,
    encode,
    load_sentencepiece,
    pieces,
    train_sentencepiece,
    write_dictionary,
)
from speech_mt.errors import InputError

FAIRSEQ_MAX_POSITIONS = 1024  # its default for --max-source-positions and --max-target-positions


@dataclass(frozen=True)
class ParallelCorpus:
    """Where a parallel text lies: the German of the training data in ``prefixes["train"]`` + ``.de``.

    Splits have fairseq's names: ``train``, ``valid``, ``test``, and ``test1``, ``test2``, ... for further test sets.
    """

    source_lang: str
    target_lang: str
    prefixes: dict[str, str]

    def sides(self, split: str) -> tuple[Path, Path]:
        """The source and the target file of ``split``."""
        prefix = self.prefixes[split]
        return Path(f"{prefix}.{self.source_lang}"), Path(f"{prefix}.{self.target_lang}")

    def files(self) -> list[Path]:
        """Both sides of every split."""
        return [path for split in self.prefixes for path in self.sides(split)]

    def inside(self, folder: Path) -> ParallelCorpus:
        """The same splits as files of ``folder``."""
        prefixes = {split: str(folder / split) for split in self.prefixes}
        return ParallelCorpus(self.source_lang, self.target_lang, prefixes)


@dataclass(frozen=True)
class LengthLimits:
    """See :func:`~speech_mt.data.text.check_parallel`."""

    max_length: int | None = None
    max_length_ratio: float | None = None


NO_LIMITS = LengthLimits()


@dataclass(frozen=True)
class Vocabulary:
    """See :func:`~speech_mt.data.vocabulary.train_sentencepiece`."""

    vocab_size: int
    model_type: str = "bpe"
    character_coverage: float = 1.0
    byte_fallback: bool = False
    max_lines: int = 0


def prepare_parallel_corpus(
    corpus: ParallelCorpus,
    destdir: Path,
    vocabulary: Vocabulary,
    limits: LengthLimits = NO_LIMITS,
    workers: int = 1,
) -> None:
    """Make ``destdir/bin``, ready for ``fairseq-train``, in four stages that a second run skips.

    ``raw/``       the checked text; pairs are dropped from ``train`` only
    ``spm.model``  sentencepiece, learned from both languages of ``raw/train`` and nothing else
    ``encoded/``   the text in pieces, and ``dict.txt``, the joint dictionary
    ``bin/``       the work of ``fairseq-preprocess``

    Every count is in ``report.raw.json`` and ``report.encoded.json``.

    Raises:
        InputError: unsound text (the message names file and line), an impossible vocabulary, a ``destdir``
            made from another text or with other settings, or that the text itself lies in, or a failing
            ``fairseq-preprocess``.
    """
    workers = bounded(workers)
    raw, encoded = corpus.inside(destdir / "raw"), corpus.inside(destdir / "encoded")
    model, dictionary = destdir / "spm.model", destdir / "dict.txt"

    refuse_to_overwrite(corpus, (raw, encoded))

    def learn() -> str:
        train_sentencepiece(chain(*map(checked_lines, raw.sides("train"))), model, **asdict(vocabulary))
        return f"{vocabulary.vocab_size} {vocabulary.model_type} pieces in {model}"

    def binarise() -> str:
        fairseq_preprocess(encoded, dictionary, destdir / "bin", destdir / "preprocess.log", workers)
        return str(destdir / "bin")

    settings: dict[str, object] = {
        f"{split} {side}": digest(path)
        for split in corpus.prefixes
        for side, path in zip(("source", "target"), corpus.sides(split), strict=True)
    }
    settings |= asdict(limits)
    run_stage(
        destdir,
        "raw",
        settings,
        lambda: check_corpus(corpus, raw, limits, destdir / "report.raw.json"),
        outputs=raw.files(),
    )
    settings |= asdict(vocabulary)
    run_stage(destdir, "spm", settings, learn, outputs=[model])
    run_stage(
        destdir,
        "encoded",
        settings,
        lambda: encode_corpus(raw, encoded, model, dictionary, destdir / "report.encoded.json", workers),
        outputs=[*encoded.files(), dictionary],
    )
    indices = [binarised_index(encoded, destdir / "bin", path) for path in encoded.files()]
    run_stage(destdir, "bin", settings, binarise, outputs=indices)


def refuse_to_overwrite(corpus: ParallelCorpus, outputs: Iterable[ParallelCorpus]) -> None:
    """See that no file of ``corpus`` is one that is going to be written.

    Raises:
        InputError: one is.
    """
    written = {path.resolve() for output in outputs for path in output.files()}
    for split in corpus.prefixes:
        for path in corpus.sides(split):
            if path.resolve() in written:
                raise InputError(f"{path}: the {split} text would be overwritten: choose another folder for the result")


def check_corpus(corpus: ParallelCorpus, raw: ParallelCorpus, limits: LengthLimits, report_path: Path) -> str:
    """Check every split of ``corpus`` and write it to ``raw``; all counts go to ``report_path``."""
    reports: dict[str, ParallelReport] = {}
    also_in_train: dict[str, dict[str, int]] = {}
    for split in corpus.prefixes:
        report = check_parallel(
            *corpus.sides(split), drop=split == "train", write_to=raw.sides(split), **asdict(limits)
        )
        reports[split] = report
        print(f"  {split}: {report.summary()}", flush=True)
        if split != "train":
            found = also_in_train[split] = overlap(report, reports["train"])
            if any(found.values()):
                print(
                    f"  warning: of {split}, {found['sources']:,} source sentences "
                    f"({found['pairs']:,} with their translation) are also in train"
                )
    _write_json(
        report_path, {"splits": {s: r.counts() for s, r in reports.items()}, "also_in_train": also_in_train}
    )
    return ", ".join(f"{report.kept:,} {split}" for split, report in reports.items()) + " pairs"


def encode_corpus(
    raw: ParallelCorpus,
    encoded: ParallelCorpus,
    model: Path,
    dictionary: Path,
    report_path: Path,
    workers: int,
) -> str:
    """Write every split of ``raw`` in pieces to ``encoded``, and the joint dictionary counted in train."""
    processor = load_sentencepiece(model)
    train_counts: Counter[str] = Counter(dict.fromkeys(pieces(processor), 0))
    reports: dict[str, dict[str, float]] = {}
    for split in raw.prefixes:
        for raw_path, encoded_path in zip(raw.sides(split), encoded.sides(split), strict=True):
            reports[raw_path.name], counts = encode_file(raw_path, encoded_path, processor, workers)
            if split == "train":
                del counts[UNKNOWN]
                train_counts.update(counts)
    write_dictionary(dictionary, train_counts)
    _write_json(report_path, reports)
    means = (f"{reports[path.name]['mean']:.2f} in {path.name}" for path in raw.sides("train"))
    return f"pieces a line: {', '.join(means)}"


def encode_file(
    raw_path: Path, encoded_path: Path, processor: SentencePieceProcessor, workers: int
) -> tuple[dict[str, float], Counter[str]]:
    """Write a checked text in pieces. Return its figures, which are printed too, and each piece's count."""
    counts: Counter[str] = Counter()
    longest, longest_line, over_long, number = 0, 0, 0, 0
    with (
        atomic_path(encoded_path) as temporary,
        open(temporary, "w", encoding="utf-8", newline="\n") as output,
    ):
        progress = tqdm(
            checked_lines(raw_path), desc=f"  {raw_path.name}", unit=" lines", delay=1, leave=False
        )
        for number, line in enumerate(encode(progress, processor, workers), start=1):
            output.write(" ".join(line) + "\n")
            counts.update(line)
            over_long += len(line) + 1 > FAIRSEQ_MAX_POSITIONS  # + 1: the end of the sentence
            if len(line) > longest:
                longest, longest_line = len(line), number
    mean, unknown_rate = counts.total() / number, counts[UNKNOWN] / max(counts.total(), 1)
    print(
        f"  {raw_path.name}: {number:,} lines, {mean:.2f} pieces a line, "
        f"longest {longest} (line {longest_line}), {unknown_rate:.3%} {UNKNOWN}",
        flush=True,
    )
    if over_long:
        print(
            f"  warning: {over_long:,} lines of {raw_path.name} exceed {FAIRSEQ_MAX_POSITIONS} pieces: "
            "fairseq skips these in train and stops at them in valid and test, unless --max-source-positions "
            "and --max-target-positions are raised"
        )
    figures = {
        "lines": number,
        "pieces": counts.total(),
        "mean": mean,
        "longest": longest,
        "longest_line": longest_line,
        "over_1024": over_long,
        "unknown": counts[UNKNOWN],
    }
    return figures, counts


def fairseq_preprocess(
    encoded: ParallelCorpus, dictionary: Path, bin_dir: Path, log_path: Path, workers: int
) -> None:
    """Run ``fairseq-preprocess`` on encoded text, with one dictionary for both languages.

    Raises:
        InputError: it failed, the message quotes its last line and names ``log_path``; or it made another number of
            sentences than there are lines, so that source and target do not belong together.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "fairseq_cli.preprocess",
        "--joined-dictionary",
        "--workers",
        str(workers),
    ]
    command += ["--source-lang", encoded.source_lang, "--target-lang", encoded.target_lang]
    command += ["--srcdict", str(dictionary), "--destdir", str(bin_dir)]
    for kind in ("train", "valid", "test"):
        prefixes = [prefix for split, prefix in encoded.prefixes.items() if split.rstrip("0123456789") == kind]
        if prefixes:
            command += [f"--{kind}pref", ",".join(prefixes)]
    print("  fairseq-preprocess ...", flush=True)
    with open(log_path, "w", encoding="utf-8") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code:
        last = log_path.read_text(encoding="utf-8", errors="replace").rstrip().rpartition("\n")[2]
        raise InputError(f"fairseq-preprocess failed, see {log_path}: {last}")
    for path in encoded.files():
        lines = count_lines(path)
        made = binarised_sentences(binarised_index(encoded, bin_dir, path))
        if made != lines:
            raise InputError(f"fairseq-preprocess made {made:,} sentences of the {lines:,} lines of {path}")


def binarised_index(encoded: ParallelCorpus, bin_dir: Path, path: Path) -> Path:
    """The ``.idx`` file that ``fairseq-preprocess`` makes of ``path``, a side of a split of ``encoded``."""
    split, _, language = path.name.partition(".")
    return bin_dir / f"{split}.{encoded.source_lang}-{encoded.target_lang}.{language}.idx"


def binarised_sentences(index: Path) -> int:
    """How many sentences an ``.idx`` file of fairseq's mmap datasets lists."""
    with open(index, "rb") as file:
        file.seek(18)  # magic number, version and type come before
        return struct.unpack("<Q", file.read(8))[0]


def checked_lines(path: Path) -> Iterator[str]:
    """The lines of a text that :func:`check_corpus` wrote."""
    with open(path, encoding="utf-8", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")


def digest(path: Path) -> str:
    """Of the content of a file, to notice that it changed."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:16]


def _write_json(path: Path, content: object) -> None:
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
