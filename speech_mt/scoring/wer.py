"""Corpus word error rate (WER) and character error rate (CER), with jiwer.

The rate is the edits of the whole corpus over its reference words, as NIST's sclite counts it, not a mean of
the utterances' rates. An utterance with an empty reference thus adds its insertions and no words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import jiwer

from ..errors import InputError
from .hypotheses import ParallelText
from .normalization import Normalization

ALIGNMENT_WIDTH = 100


@dataclass(frozen=True)
class Edits:
    """Edits from reference to hypothesis; ``rate`` is their number in percent of the ``reference`` units."""

    substitutions: int
    deletions: int
    insertions: int
    reference: int

    @property
    def errors(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        return 100 * self.errors / self.reference


@dataclass(frozen=True)
class UtteranceErrors:
    """An utterance with its word errors, and the alignment that shows them (REF, HYP and S, D, I below)."""

    id: str
    errors: int
    words: int
    alignment: str


@dataclass(frozen=True)
class WerReport:
    """Error rates and what is needed to repeat them. ``str`` is for people, :meth:`as_dict` for programs."""

    utterances: int
    provenance: dict[str, str]
    normalization: str
    words: Edits
    characters: Edits
    worst: list[UtteranceErrors]
    warnings: list[str]

    def as_dict(self) -> dict[str, object]:
        """The fields, with rates in percent as ``wer`` and ``cer``."""
        return {"wer": self.words.rate, "cer": self.characters.rate, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = [f"{name:<14} {text}" for name, text in self.provenance.items()]
        lines += [f"{'normalisation':<14} {self.normalization}", f"{'utterances':<14} {self.utterances}", ""]
        lines.append(
            f"{'':<3} {'rate':>8} {'errors':>8} {'subst.':>8} {'deleted':>8} {'inserted':>8}   reference"
        )
        for name, unit, edits in ("WER", "words", self.words), ("CER", "characters", self.characters):
            lines.append(
                f"{name} {edits.rate:7.2f}% {edits.errors:8} {edits.substitutions:8} {edits.deletions:8} "
                f"{edits.insertions:8}   {edits.reference} {unit}"
            )
        for utterance in self.worst:
            lines.append(f"\n{utterance.id}: {utterance.errors} errors in {utterance.words} words")
            lines.append(utterance.alignment)
        return "\n".join(lines + [""] * bool(self.warnings) + [f"warning: {text}" for text in self.warnings])


def score_wer(text: ParallelText, normalization: Normalization | None = None, worst: int = 0) -> WerReport:
    """WER and CER of ``text`` against its first reference; CER counts the space between words as a character.

    Args:
        normalization: applied to both sides; default: whitespace is folded, nothing else.
        worst: how many of the utterances with most word errors to show aligned.

    Raises:
        InputError: the references have no words at all, so that the rate has no denominator.
    """
    normalization = normalization or Normalization()
    references = [normalization(reference) for reference in text.references[0]]
    hypotheses = [normalization(hypothesis) for hypothesis in text.hypotheses]
    if not any(references):
        raise InputError(f"{text.provenance['reference']} has no words: an error rate needs some")
    # one utterance at a time: as fast, and jiwer holds every character as an object until it is done
    pairs = list(zip(references, hypotheses, strict=True))
    words = [_edits(jiwer.process_words(*pair)) for pair in pairs]
    characters = [_edits(jiwer.process_characters(*pair)) for pair in pairs]
    return WerReport(
        utterances=len(pairs),
        provenance=text.provenance,
        normalization=str(normalization),
        words=_total(words),
        characters=_total(characters),
        worst=list(_worst(words, pairs, text.ids, worst)),
        warnings=text.warnings + list(_case_warning(references, hypotheses)),
    )


def results_table(reports: Mapping[str, WerReport]) -> str:
    """Reports by name, a row each: utterances, reference words, WER, its substitutions, deletions, insertions, CER."""
    width = max(len("set"), *map(len, reports))
    columns = "".join(f" {name:>8}" for name in ("words", "WER", "subst.", "deleted", "inserted", "CER"))
    lines = [f"{'set':<{width}} {'utterances':>10}{columns}"]
    for name, report in reports.items():
        words = report.words
        lines.append(
            f"{name:<{width}} {report.utterances:10} {words.reference:8} {words.rate:7.2f}% {words.substitutions:8} "
            f"{words.deletions:8} {words.insertions:8} {report.characters.rate:7.2f}%"
        )
    lines += ["", *(f"normalisation  {used}" for used in dict.fromkeys(r.normalization for r in reports.values()))]
    return "\n".join(
        lines + [f"warning: {name}: {text}" for name, report in reports.items() for text in report.warnings]
    )


def _edits(output: jiwer.WordOutput | jiwer.CharacterOutput) -> Edits:
    reference = output.hits + output.substitutions + output.deletions
    return Edits(output.substitutions, output.deletions, output.insertions, reference)


def _total(edits: list[Edits]) -> Edits:
    return Edits(*(sum(column) for column in zip(*map(dataclasses.astuple, edits), strict=True)))


def _worst(
    words: list[Edits], pairs: list[tuple[str, str]], ids: list[str], count: int
) -> Iterator[UtteranceErrors]:
    """The ``count`` utterances with most errors: what the corpus rate is made of. Ties in corpus order."""
    for i in sorted(range(len(words)), key=lambda i: -words[i].errors)[:count]:
        if words[i].errors:
            output = jiwer.process_words(*pairs[i])
            drawing = jiwer.visualize_alignment(output, show_measures=False, line_width=ALIGNMENT_WIDTH)
            alignment = drawing.split("\n\n", 1)[1].rstrip()  # without jiwer's own heading
            yield UtteranceErrors(ids[i], words[i].errors, words[i].reference, alignment)


def _case_warning(references: list[str], hypotheses: list[str]) -> Iterator[str]:
    reference, hypothesis = " ".join(references), " ".join(hypotheses)
    if (reference.isupper() and hypothesis.islower()) or (reference.islower() and hypothesis.isupper()):
        yield "one side is all upper case and the other all lower case; --lowercase makes them comparable"
