"""Vocabularies: characters or sentencepiece pieces, and the dictionary (``dict.txt``) that fairseq reads."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby, islice
from pathlib import Path
from tempfile import TemporaryDirectory

import sentencepiece

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError

WORD_BOUNDARY = "|"
UNKNOWN = "<unk>"
PIECE_BOUNDARY = "\u2581"  # begins a sentencepiece piece that begins a word
MIN_PIECES = 4  # <unk>, <s>, </s> and one more
MIN_CHARACTER_COVERAGE, MIN_LINES = 0.98, 101  # what sentencepiece takes
FAIRSEQ_SYMBOLS = ("<s>", "<pad>", "</s>", UNKNOWN)  # fairseq adds these itself


def characters(text: str) -> list[str]:
    """``"two six"`` as ``["t", "w", "o", "|", "s", "i", "x"]``; any run of white space is one word boundary.

    This is what fairseq's ``--post-process letter`` undoes.

    Raises:
        InputError: ``text`` holds ``|`` itself.
    """
    if WORD_BOUNDARY in text:
        raise InputError(
            f"{text!r} holds {WORD_BOUNDARY!r}, which stands for the space between words: replace it"
        )
    return list(WORD_BOUNDARY.join(text.split()))


def character_counts(lines: Iterable[str]) -> Counter[str]:
    """How often each character, and the word boundary, occurs in ``lines``."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(characters(line))
    return counts


def sentencepiece_counts(lines: Iterable[str], model: sentencepiece.SentencePieceProcessor) -> Counter[str]:
    """How often each piece of ``model`` occurs in ``lines``; those that never do are there too, with 0.

    They belong in the dictionary: without the 256 bytes, byte fallback would end in ``<unk>`` after all.
    """
    counts: Counter[str] = Counter(dict.fromkeys(pieces(model), 0))
    for encoded in encode(lines, model):
        counts.update(piece for piece in encoded if piece != UNKNOWN)
    return counts


def write_dictionary(path: Path, counts: Mapping[str, int]) -> None:
    """Write the lines of :func:`dictionary_text`.

    Raises:
        InputError: see there.
    """
    text = dictionary_text(path, counts)
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def dictionary_text(path: Path, counts: Mapping[str, int]) -> str:
    """Lines of ``symbol count``, most frequent first, equal ones by code point: same text, same file.

    Args:
        path: of the file that they are for, to be named.

    Raises:
        InputError: there is no symbol, or one that fairseq could not read back.
    """
    if not counts:
        raise InputError(f"{path}: the training text is empty, so there is no vocabulary to write")
    for symbol in counts:
        if not symbol or symbol.split() != [symbol] or symbol in FAIRSEQ_SYMBOLS:
            raise InputError(
                f"{path}: {symbol!r} cannot be a dictionary symbol: take it out of the training text"
            )
    ranked = sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))
    return "".join(f"{symbol} {count}\n" for symbol, count in ranked)


def read_dictionary(path: Path) -> dict[str, int]:
    """The symbols of a ``dict.txt`` and their ids in fairseq, whose own four come first.

    Raises:
        InputError: the file is missing or no such dictionary.
    """
    if not path.is_file():
        raise InputError(f"{path}: no such dictionary; make it by scripts/build_vocabulary.py")
    symbols = list(FAIRSEQ_SYMBOLS)
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        symbol, space, count = line.rpartition(b" ")
        if not space or not count.isdigit():
            raise InputError(f"{path} line {number}: expected a symbol and a count, found {line!r}")
        symbols.append(symbol.decode(errors="replace"))
    return {symbol: index for index, symbol in enumerate(symbols)}


def train_sentencepiece(
    lines: Iterable[str],
    model_path: Path,
    *,
    vocab_size: int,
    model_type: str = "bpe",
    character_coverage: float = 1.0,
    byte_fallback: bool = False,
    max_lines: int = 0,
) -> None:
    """Learn ``vocab_size`` pieces, ``<unk>``, ``<s>`` and ``</s>`` among them: exactly so many, never fewer.

    Args:
        lines: training text only; lines over 4,192 bytes are not learned from (sentencepiece's own limit).
        model_path: the model file to write.
        model_type: ``bpe`` or ``unigram``.
        character_coverage: the share of the running characters that must be spelled without ``<unk>``.
        byte_fallback: spell what is not covered as UTF-8 bytes (256 further pieces) instead of ``<unk>``.
        max_lines: learn from a random sample of so many lines; 0 means all.

    Raises:
        InputError: the text has too few different strings, or too many characters, for ``vocab_size`` pieces,
            or sentencepiece does not take such numbers.
    """
    if not MIN_CHARACTER_COVERAGE <= character_coverage <= 1:
        raise InputError(
            f"character coverage {character_coverage:g}: sentencepiece takes {MIN_CHARACTER_COVERAGE} to 1"
        )
    if 0 < max_lines < MIN_LINES:
        raise InputError(
            f"a sample of {max_lines} lines: sentencepiece takes at least {MIN_LINES}; 0 means all"
        )
    sentencepiece.set_random_generator_seed(1)  # for the sample
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            character_coverage=character_coverage,
            byte_fallback=byte_fallback,
            input_sentence_size=max_lines,
            shuffle_input_sentence=max_lines > 0,
            hard_vocab_limit=True,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = (
            str(error).rpartition("] ")[2].removeprefix("INVALID_ARGUMENT:").strip()
            or "the training text is empty"
        )
        raise InputError(f"sentencepiece cannot learn {vocab_size} {model_type} pieces: {reason}") from None
    with atomic_path(model_path) as temporary:
        temporary.write_bytes(model.getvalue())


def build_vocabulary(
    texts: Callable[[], Iterable[str]],
    folder: Path,
    *,
    vocab_type: str = "char",
    size: int = 1000,
    model_type: str = "unigram",
    force: bool = False,
) -> int:
    """Write ``dict.txt``, and for sentencepiece ``spm.model``, to ``folder``; return the number of symbols.

    Args:
        texts: gives the training transcripts, each time it is called.
        folder: where the files go.
        vocab_type: ``char`` or ``sentencepiece``.
        size, model_type: of sentencepiece, see :func:`train_sentencepiece`.
        force: replace another vocabulary; a ``spm.model`` is deleted where characters need none.

    Raises:
        InputError: another vocabulary is there, which the models that were trained with it need; see
            :func:`characters`, :func:`dictionary_text` and :func:`train_sentencepiece`.
    """
    dictionary, model = folder / "dict.txt", folder / "spm.model"
    learned: bytes | None = None
    if vocab_type == "char":
        counts = character_counts(texts())
    else:
        with TemporaryDirectory() as temporary:
            path = Path(temporary) / model.name
            train_sentencepiece(texts(), path, vocab_size=size, model_type=model_type)
            counts = sentencepiece_counts(texts(), load_sentencepiece(path))
            learned = path.read_bytes()
    text = dictionary_text(dictionary, counts)
    for path, content in ((dictionary, text.encode()), (model, learned)):
        if not force and path.exists() and path.read_bytes() != content:
            raise InputError(
                f"{path} is of another vocabulary, which the models trained with it need: keep it and use another "
                "folder, or replace it with --force"
            )
    if learned is None:
        model.unlink(missing_ok=True)
    else:
        with atomic_path(model) as temporary:
            temporary.write_bytes(learned)
    with atomic_path(dictionary) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return len(counts)


def load_sentencepiece(model_path: Path) -> sentencepiece.SentencePieceProcessor:
    """Load a sentencepiece model.

    Raises:
        InputError: the file holds no such model.
    """
    proto = Path(model_path).read_bytes()
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=proto)
    except RuntimeError:
        raise InputError(
            f"{model_path} is not a sentencepiece model: delete it or give another file"
        ) from None


def pieces(model: sentencepiece.SentencePieceProcessor) -> list[str]:
    """The pieces that text can be split into, in the model's order: no ``<unk>``, no control symbols."""
    usable = (
        i for i in range(len(model)) if not (model.is_control(i) or model.is_unknown(i) or model.is_unused(i))
    )
    return [model.id_to_piece(i) for i in usable]


def encode(
    lines: Iterable[str], model: sentencepiece.SentencePieceProcessor, workers: int = 1
) -> Iterator[list[str]]:
    """Split each line into pieces; what the model does not cover becomes ``<unk>``.

    Sentencepiece itself would hand back the uncovered characters, and fairseq would read such a ``</s>`` in
    the middle of a sentence as its end.
    """
    known = frozenset(pieces(model))
    remaining = iter(lines)
    while batch := list(islice(remaining, 10_000)):
        for encoded in model.encode(batch, out_type=str, num_threads=workers):
            yield [piece if piece in known else UNKNOWN for piece in encoded]


def detokenize(pieces: Iterable[str]) -> str:
    """The text that pieces spell: the opposite of :func:`encode`. A run of byte pieces spells characters in UTF-8."""
    text = ""
    for are_bytes, group in groupby(pieces, key=lambda piece: _BYTE.fullmatch(piece) is not None):
        run = "".join(group)
        text += bytes.fromhex(_BYTE.sub(r"\1", run)).decode(errors="replace") if are_bytes else run
    return text.replace(PIECE_BOUNDARY, " ").strip()


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
