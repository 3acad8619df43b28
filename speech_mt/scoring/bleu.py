"""Corpus BLEU (Papineni et al., 2002) and chrF (Popovic, 2015), computed by sacrebleu, with their signatures.

Two conventions are in use for WMT English-German and differ by half a point or more on the same output:

* sacreBLEU (Post, 2018): detokenised text, tokenised by the metric itself;
* "compound-split" tokenised BLEU, as papers since Vaswani et al. (2017) report it, from tensor2tensor's
  ``get_ende_bleu.sh``: on tokenised text every hyphen between two characters becomes a token
  ``##AT##-##AT##``, on both sides, then BLEU without smoothing. Those papers tokenise with Moses: to repeat
  one to the digit, give Moses-tokenised text and say ``tokenized``; else the text is tokenised with 13a.

The two are never comparable, so each score carries its name and signature.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass

from sacrebleu.metrics import BLEU, CHRF
from sacrebleu.significance import PairedTest
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from ..errors import InputError
from .hypotheses import ParallelText

LENGTHS = (10, 20, 30, 40, 50)
"""Upper bounds, in words of the reference, of the buckets of ``by_length``; the last bucket has none."""


@dataclass(frozen=True)
class MetricScore:
    """A corpus score from 0 to 100; ``details`` are BLEU's precisions, brevity penalty (BP) and lengths."""

    name: str
    score: float
    signature: str
    details: str = ""


@dataclass(frozen=True)
class LengthBucket:
    """BLEU of the sentences whose first reference has ``shortest`` to ``longest`` whitespace-separated words.

    ``length_ratio`` is hypothesis over reference tokens (at least 1): below 1, translations are too short.
    """

    shortest: int
    longest: int | None
    sentences: int
    bleu: float
    length_ratio: float


@dataclass(frozen=True)
class PairedResult:
    """Paired bootstrap (Koehn, 2004): scores, half-widths (ci) of their 95 % intervals, two-sided p-value."""

    metric: str
    baseline: float
    baseline_ci: float
    system: float
    system_ci: float
    p_value: float
    signature: str


@dataclass(frozen=True)
class BleuReport:
    """All that was asked for. ``str`` of it is the table for people, :meth:`as_dict` is for programs."""

    sentences: int
    provenance: dict[str, str]
    scores: list[MetricScore]
    by_length: list[LengthBucket]
    paired: list[PairedResult]
    warnings: list[str]

    def as_dict(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"{name:<14} {text}" for name, text in self.provenance.items()]
        lines += [f"{'sentences':<14} {self.sentences}", ""]
        width = max(len(score.name) for score in self.scores)
        for score in self.scores:
            lines.append(f"{score.name:<{width}} {score.score:6.2f}  {score.signature}")
            if score.details:
                lines.append(f"{'':<{width}} {'':6}  {score.details}")
        if self.by_length:
            lines += ["", "reference words   sentences    BLEU  length ratio"]
        for bucket in self.by_length:
            bounds = f"{bucket.shortest}-{bucket.longest}" if bucket.longest else f"> {bucket.shortest - 1}"
            lines.append(
                f"{bounds:<17} {bucket.sentences:>9}  {bucket.bleu:6.2f}  {bucket.length_ratio:12.3f}"
            )
        if self.paired:
            lines += ["", "paired bootstrap      baseline     hypotheses  difference  p-value"]
        for pair in self.paired:
            lines.append(
                f"{pair.metric:<15} {pair.baseline:6.2f} ± {pair.baseline_ci:4.2f}  {pair.system:6.2f} ± "
                f"{pair.system_ci:4.2f}  {pair.system - pair.baseline:+10.2f}  {pair.p_value:7.4f}"
            )
        lines += [f"{pair.metric:<15} {pair.signature}" for pair in self.paired]
        return "\n".join(lines + [""] * bool(self.warnings) + [f"warning: {text}" for text in self.warnings])


def score_bleu(
    text: ParallelText,
    *,
    compound_split: bool = False,
    tokenized: bool = False,
    by_length: bool = False,
    baseline: ParallelText | None = None,
    n_samples: int = 1000,
) -> BleuReport:
    """BLEU and chrF of ``text``.

    Args:
        compound_split: report compound-split tokenised BLEU in addition.
        tokenized: the text is tokenised already: BLEU splits on spaces only, and its signature says tok:none.
        by_length: report BLEU for each bucket of :data:`LENGTHS`.
        baseline: another system's hypotheses of the same references, for a paired bootstrap.
        n_samples: bootstrap resamples; sacrebleu takes 72 * ``n_samples`` bytes of memory a sentence.

    Raises:
        InputError: ``baseline`` has other references; a reference has no words at all.
    """
    for lines in text.references:
        if not any(map(str.strip, lines)):
            raise InputError(f"{text.provenance['reference']} has no words: BLEU needs some")
    # force: no log line on text that looks tokenised, as the report has a warning of its own
    bleu = BLEU(tokenize="none" if tokenized else "13a", force=True)
    scores = [_score("BLEU", bleu, text), _score("chrF", CHRF(), text)]
    if compound_split:
        scores.append(_compound_split_bleu(text, tokenized))
    provenance, warnings, paired = dict(text.provenance), list(text.warnings), []
    if not tokenized:
        warnings += _tokenized_warnings(text)
    if baseline is not None:
        provenance["baseline"] = baseline.provenance["hypotheses"]
        warnings += [warning for warning in baseline.warnings if warning not in warnings]
        paired = list(_paired_bootstrap(text, baseline, {"BLEU": bleu, "chrF": CHRF()}, n_samples))
    return BleuReport(
        sentences=len(text.hypotheses),
        provenance=provenance,
        scores=scores,
        by_length=list(_by_length(text, bleu)) if by_length else [],
        paired=paired,
        warnings=warnings,
    )


def _score(name: str, metric: BLEU | CHRF, text: ParallelText) -> MetricScore:
    result = metric.corpus_score(text.hypotheses, text.references)
    details = ""
    if isinstance(metric, BLEU):
        precisions = "/".join(f"{precision:.1f}" for precision in result.precisions)
        lengths = f"{result.sys_len} hypothesis and {result.ref_len} reference tokens"
        details = f"{precisions}, BP {result.bp:.3f}, {lengths}"
    return MetricScore(name, result.score, str(metric.get_signature()), details)


def split_compounds(tokens: str) -> str:
    """The substitution of ``get_ende_bleu.sh``: matches do not overlap, so ``a-b-c`` is split once only."""
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", tokens)


def _compound_split_bleu(text: ParallelText, tokenized: bool) -> MetricScore:
    tokenize = str.strip if tokenized else Tokenizer13a()
    split = dataclasses.replace(
        text,
        hypotheses=[split_compounds(tokenize(line)) for line in text.hypotheses],
        references=[[split_compounds(tokenize(line)) for line in lines] for lines in text.references],
    )
    score = _score("compound-split BLEU", BLEU(tokenize="none", smooth_method="none", force=True), split)
    convention = f"tok:{'none' if tokenized else '13a'}+compound_split"
    return dataclasses.replace(score, signature=score.signature.replace("tok:none", convention))


def _by_length(text: ParallelText, bleu: BLEU) -> Iterator[LengthBucket]:
    lengths = [len(reference.split()) for reference in text.references[0]]
    for shortest, longest in zip((0, *(n + 1 for n in LENGTHS)), (*LENGTHS, None), strict=True):
        chosen = [i for i, n in enumerate(lengths) if shortest <= n and (longest is None or n <= longest)]
        if chosen:
            hypotheses = [text.hypotheses[i] for i in chosen]
            result = bleu.corpus_score(hypotheses, [[lines[i] for i in chosen] for lines in text.references])
            ratio = result.sys_len / max(result.ref_len, 1)
            yield LengthBucket(shortest, longest, len(chosen), result.score, ratio)


def _paired_bootstrap(
    text: ParallelText, baseline: ParallelText, metrics: dict[str, BLEU | CHRF], n_samples: int
) -> Iterator[PairedResult]:
    if baseline.references != text.references:
        raise InputError(
            f"{text.provenance['hypotheses']} and {baseline.provenance['hypotheses']} have different "
            "references: a paired test compares two systems on one test set"
        )
    systems = [("baseline", baseline.hypotheses), ("system", text.hypotheses)]
    signatures, results = PairedTest(systems, metrics, text.references, test_type="bs", n_samples=n_samples)()
    for name, (key, signature) in zip(metrics, signatures.items(), strict=True):
        base, system = results[key]
        # sacrebleu counts resamples strictly above the difference: equal outputs have none, its p is near 0
        p_value = 1.0 if base.score == system.score else system.p_value
        numbers = (
            base.score,
            base.ci,
            system.score,
            system.ci,
            p_value,
        )  # some are numpy's, which JSON refuses
        yield PairedResult(name, *map(float, numbers), str(signature))


def _tokenized_warnings(text: ParallelText) -> Iterator[str]:
    for name, lines in ("hypotheses", text.hypotheses), *(("references", lines) for lines in text.references):
        tokenized = sum(line.rstrip().endswith(" .") and "▁" not in line for line in lines)
        if 2 * tokenized > len(lines):
            yield (
                f"{tokenized} of {len(lines)} {name} end in ' .', as tokenised text does; detokenise them "
                "(fairseq-generate --tokenizer moses), or score the tokens as they are with --tokenized"
            )
