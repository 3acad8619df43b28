"""Moses tokenisation of a text, by sacremoses, on several processes. Line k stays line k."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path

from speech_mt.data.parallel_map import bounded
from speech_mt.data.stage import atomic_path
from speech_mt.data.text import SideReport, read_lines
from speech_mt.errors import InputError

_CHUNK = 2000  # lines


def tokenize_file(path: Path, output: Path, language: str, workers: int = 1) -> str:
    """Normalise punctuation and tokenise, splitting hyphens as ``@-@``; return a line about it.

    This is what fairseq's recipes for WMT do with Moses' own scripts; ``fairseq-generate --tokenizer moses`` undoes it.

    Raises:
        InputError: sacremoses is not installed; unsound text (see :func:`~speech_mt.data.text.read_lines`).
    """
    try:
        import sacremoses  # noqa: F401
    except ImportError:
        raise InputError("sacremoses is not installed: pip install 'speech_mt[moses]'") from None
    report = SideReport(str(path))
    chunks = ((language, chunk) for chunk in _chunks(read_lines(path, report)))
    with atomic_path(output) as temporary, open(temporary, "w", encoding="utf-8", newline="\n") as file:
        for line in chain.from_iterable(_tokenized(chunks, workers)):
            file.write(line + "\n")
    return f"{report.lines:,} lines of {path.name}"


def _tokenized(chunks: Iterable[tuple[str, list[str]]], workers: int) -> Iterator[list[str]]:
    if workers == 1:
        yield from map(_tokenize, chunks)
        return
    with get_context("spawn").Pool(bounded(workers)) as pool:
        yield from pool.imap(_tokenize, chunks)


def _chunks(lines: Iterator[str]) -> Iterator[list[str]]:
    while chunk := list(islice(lines, _CHUNK)):
        yield chunk


@cache
def _tools(language: str) -> tuple[object, object]:
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    return MosesPunctNormalizer(language), MosesTokenizer(language)


def _tokenize(chunk: tuple[str, list[str]]) -> list[str]:
    language, lines = chunk
    normalizer, tokenizer = _tools(language)
    return [
        tokenizer.tokenize(normalizer.normalize(line), aggressive_dash_splits=True, return_str=True) for line in lines
    ]
