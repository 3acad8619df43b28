"""Reading what is scored, from the files people have, and pairing hypotheses with references.

The format is found from the content:

* output of ``fairseq-generate`` or ``fairseq-interactive``: captured stdout or the ``generate-*.txt`` of
  ``--results-path``. ``D-`` lines are the detokenised hypotheses (else ``H-``, their tokens), ``T-`` lines
  the references. It comes in batch order and is sorted by id here;
* a LibriSpeech ``*.trans.txt``: ``1089-134686-0000 HE HOPED ...`` on every line;
* a tab-separated manifest: a header with columns ``id`` and ``text`` (or fairseq's ``tgt_text``), no quoting;
* else plain text, one sentence a line, empty lines included.

Lines end in LF or CRLF. Files are UTF-8, with or without byte order mark. All else is refused, not repaired:
a sentence too many or too few shifts every pair after it and gives a score that means nothing.
"""

from __future__ import annotations

import codecs
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import InputError
from .normalization import POST_PROCESS, is_segmented, remove_marks

StrPath = str | os.PathLike[str]
Lines = Iterable[tuple[int, bytes]]  # (line number from 1, content without its line end)

_RESULT = re.compile(rb"([THD])-(\d{1,12})\t")
_END = re.compile(rb"Generate \S+ with beam=\d+:")  # the last line of a fairseq-generate that came to its end
_LOG = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \| [A-Z]+ \| ")
_UTTERANCE = re.compile(r"(\d+-\d+-\d+)(?:\s+(.*))?")


@dataclass(frozen=True)
class Sentences:
    """Sentences in corpus order. ``ids`` name them; ``keyed`` if those are utterance ids of the corpus.

    ``left_out`` counts the hypotheses of n-best lists that are not the first.
    """

    source: str
    texts: list[str]
    ids: list[str]
    keyed: bool = False
    left_out: int = 0


@dataclass(frozen=True)
class ParallelText:
    """Hypotheses with one or more references each.

    Attributes:
        hypotheses: N texts.
        references: one list of N texts for each reference, in the order of the hypotheses.
        ids: N names of the sentences, utterance ids where a file has them.
        provenance: what was read and what was done to it, for the report.
        warnings: what is probably not meant, though it can be scored.
    """

    hypotheses: list[str]
    references: list[list[str]]
    ids: list[str]
    provenance: dict[str, str]
    warnings: list[str]


def read_parallel(
    hypotheses: StrPath, references: Sequence[StrPath] = (), post_process: str | None = None
) -> ParallelText:
    """Read hypotheses and references and pair them: by utterance id if both have them, else by order.

    Args:
        hypotheses: file in any of the formats above.
        references: files likewise; none: the ``T-`` lines of the hypothesis file.
        post_process: scheme of subword marks to remove wherever a text is written in them
            (see :data:`~speech_mt.scoring.normalization.POST_PROCESS`).

    Raises:
        InputError: an unreadable line; a missing, second or unpaired sentence; no reference.
    """
    found = _read(hypotheses)
    own = found.get("T")
    system = found.get("D") or found.get("H") or found.get("plain")
    if system is None:
        raise InputError(f"{hypotheses} has T- lines but no D- or H- lines: there is no hypothesis in it")
    if own and len(own.texts) != len(system.texts):
        raise InputError(
            f"{hypotheses}: {len(own.texts)} T- lines but {len(system.texts)} {system.ids[0][:2]} lines: "
            "the output is incomplete, run fairseq-generate again"
        )
    if not own and not references:
        raise InputError(f"{hypotheses} holds no references (T- lines): name the reference file with --ref")
    targets = [_read_references(path, own) for path in references] or [own]
    ids = targets[0].ids if targets[0].keyed and not system.keyed else system.ids

    texts = [system, *(_align(target, system) for target in targets)]
    provenance = {"hypotheses": system.source, "reference": "; ".join(target.source for target in targets)}
    if system.left_out:
        provenance["n-best lists"] = f"the first of each kept, {system.left_out} others left out"
    if post_process is not None:
        sources = []
        for i, text in enumerate(texts):
            if is_segmented(text.texts, post_process):
                texts[i] = replace(text, texts=[remove_marks(line, post_process) for line in text.texts])
                sources.append(text.source)
        provenance["marks removed"] = (
            f"{post_process}, from {'; '.join(sources) or 'nothing: no text has them'}"
        )
    warnings = [warning for text in texts for warning in _warnings(text)]
    return ParallelText(texts[0].texts, [text.texts for text in texts[1:]], ids, provenance, warnings)


def _read_references(path: StrPath, own: Sentences | None) -> Sentences:
    """References of ``path``. ``own``, the T- lines of the hypotheses' file, must agree with its T- lines."""
    found = _read(path)
    if "plain" in found:
        return found["plain"]
    if "T" not in found:
        raise InputError(f"{path} has D- or H- lines but no T- lines: there is no reference in it")
    if own and own.texts != found["T"].texts:
        raise InputError(
            f"{own.source} and {found['T'].source} differ: other data, or other subword marks; "
            "name the reference text with --ref"
        )
    return found["T"]


def _align(references: Sentences, hypotheses: Sentences) -> Sentences:
    """``references`` in the order of ``hypotheses``: one for each, or :class:`InputError`."""
    if not (references.keyed and hypotheses.keyed):
        if len(references.texts) != len(hypotheses.texts):
            raise InputError(
                f"{len(hypotheses.texts)} hypotheses ({hypotheses.source}) but {len(references.texts)} "
                f"references ({references.source}): give both for the same sentences; fairseq-generate "
                "decodes all of them with --required-batch-size-multiple 1"
            )
        return references
    for here, there in (hypotheses, references), (references, hypotheses):
        if lacking := set(here.ids) - set(there.ids):
            raise InputError(
                f"{there.source} lacks {len(lacking)} utterances of {here.source}, first {min(lacking)}"
            )
    text_of = dict(zip(references.ids, references.texts, strict=True))
    return replace(references, texts=[text_of[i] for i in hypotheses.ids], ids=hypotheses.ids)


def _warnings(sentences: Sentences) -> Iterator[str]:
    for scheme in POST_PROCESS:
        bare = scheme == "letter" and not any("|" in text for text in sentences.texts)  # spelled words: A B C
        if is_segmented(sentences.texts, scheme) and not bare:
            yield f"{sentences.source}: looks like {scheme} pieces; --post-process {scheme} joins them"
    if unknown := sum("<<unk>>" in text for text in sentences.texts):
        yield (
            f"{sentences.source}: {unknown} sentences have <<unk>> for what the vocabulary lacks; "
            "give the original text with --ref"
        )


def _read(path: StrPath) -> dict[str, Sentences]:
    """Sentences by kind: ``T``, ``H``, ``D`` lines of generate output, or ``plain``; in one pass."""
    lines = _lines(path)
    read = []
    for number, line in lines:
        read.append((number, line))
        if _RESULT.match(line):
            return _parse_generate_output(path, itertools.chain(read, lines))
    return {"plain": _parse_text(path, read)}


def _lines(path: StrPath) -> Iterator[tuple[int, bytes]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.endswith(b"\n") and _RESULT.match(line):
                raise InputError(
                    f"{path} ends in the middle of line {number}: fairseq-generate has not finished; wait for it, or "
                    "run it again"
                )
            yield number, line.removesuffix(b"\n").removesuffix(b"\r")


def _decode(path: StrPath, number: int, line: bytes) -> str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} line {number} is not UTF-8: byte {error.start + 1} is 0x{line[error.start]:02X}; "
            "convert the file, for example with iconv -t utf-8"
        ) from None
    for character, name in ("\r", "carriage return (0x0D)"), ("\0", "NUL character"):
        if character in text:
            raise InputError(
                f"{path} line {number} has a {name} at character {text.index(character) + 1}: remove it, "
                "as programs that read it as a line end count one line more"
            )
    return text


def _parse_generate_output(path: StrPath, lines: Lines) -> dict[str, Sentences]:
    texts: dict[str, dict[int, str]] = {"T": {}, "H": {}, "D": {}}
    last: dict[str, int] = {}
    left_out = dict.fromkeys(texts, 0)
    finished = False
    for number, line in lines:
        match = _RESULT.match(line)
        if match is None:
            finished |= _END.match(line) is not None
            if b"\r" in line and _RESULT.search(line):
                raise InputError(
                    f"{path} line {number}: a progress bar runs into a result line: capture stdout without "
                    "stderr, or use fairseq-generate --results-path"
                )
            continue
        kind, index = match[1].decode(), int(match[2])
        if kind == "H" and texts["D"]:
            continue
        text = _decode(path, number, line)[match.end() :]
        if kind != "T":
            score, _, text = text.partition("\t")
            if not _is_number(score):
                raise InputError(
                    f"{path} line {number}: {kind}-{index} has {score[:20]!r} in place of its score: "
                    "give the output of fairseq-generate as it is"
                )
        if index not in texts[kind]:
            texts[kind][index] = text
        elif kind != "T" and index == last[kind]:  # an n-best list stands together, best first
            left_out[kind] += 1
        else:
            raise InputError(
                f"{path} line {number}: a second {kind}-{index}: the file holds more than one run, "
                "give each run its own file"
            )
        last[kind] = index
    if texts["D"]:
        texts["H"].clear()
    return {kind: _in_order(path, kind, of, left_out[kind], finished) for kind, of in texts.items() if of}


def _is_number(field: str) -> bool:
    try:
        float(field)
    except ValueError:
        return False
    return True


def _in_order(path: StrPath, kind: str, texts: dict[int, str], left_out: int, finished: bool) -> Sentences:
    count = max(texts) + 1
    if missing := count - len(texts):
        first = next(index for index in itertools.count() if index not in texts)
        reason = "it has no end: fairseq-generate has not finished, or was interrupted; wait, or run it again"
        if finished:
            reason = (
                "fairseq-generate left out the end of the last batch (decode with --required-batch-size-multiple 1) "
                "or what is too long for the model"
            )
        raise InputError(f"{path}: {kind}-{first} is missing ({missing} of ids 0 to {count - 1} are): {reason}")
    ids = [f"{kind}-{i}" for i in range(count)]
    return Sentences(f"{kind}- lines of {path}", [texts[i] for i in range(count)], ids, left_out=left_out)


def _parse_text(path: StrPath, lines: Lines) -> Sentences:
    texts = [_decode(path, number, line) for number, line in lines]
    if not texts:
        raise InputError(f"{path} is empty")
    if _LOG.match(texts[0]):
        raise InputError(
            f"{path} is a fairseq log without results: fairseq-generate has not finished, or ran with --quiet, or "
            "wrote them to its --results-path"
        )
    header = texts[0].split("\t")
    if "id" in header and ("text" in header or "tgt_text" in header):
        return _parse_manifest(path, header, texts[1:])
    utterances = [_UTTERANCE.fullmatch(text) for text in texts]
    if 2 * sum(map(bool, utterances)) <= len(utterances):
        return Sentences(f"{path}", texts, [f"line {number}" for number in range(1, len(texts) + 1)])
    if not all(utterances):
        number = utterances.index(None) + 1
        raise InputError(f"{path} line {number} does not start with an utterance id as the others do")
    ids = [match[1] for match in utterances]
    return _keyed(Sentences(f"LibriSpeech transcripts {path}", [match[2] or "" for match in utterances], ids))


def _parse_manifest(path: StrPath, header: list[str], rows: list[str]) -> Sentences:
    fields = [row.split("\t") for row in rows]
    for number, row in enumerate(fields, 2):
        if len(row) != len(header):
            raise InputError(
                f"{path} line {number} has {len(row)} tab-separated fields, its header has {len(header)}: "
                "remove tabs within a field, fill in empty ones"
            )
    if not fields:
        raise InputError(f"{path} has a header and no rows")
    text, utterance = header.index("text" if "text" in header else "tgt_text"), header.index("id")
    return _keyed(
        Sentences(f"manifest {path}", [row[text] for row in fields], [row[utterance] for row in fields])
    )


def _keyed(sentences: Sentences) -> Sentences:
    seen: set[str] = set()
    for utterance in sentences.ids:
        if utterance in seen:
            raise InputError(f"{sentences.source} has a second utterance {utterance}: ids must differ")
        seen.add(utterance)
    return replace(sentences, keyed=True)
