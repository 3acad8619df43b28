"""The layers to worry about and why, from the numbers of :mod:`speech_mt.diagnostics.inspection`.

What is too much? Layers of one model start alike and stay comparable in a healthy training, so that one far from its
peers (the same weight in the other layers of its kind, or all heads of that kind) stands out. Logits, cosines and
entropies have scales of their own. Low entropy alone is no fault: it is where large logits are behind it, or where
W_Q W_K^T is large in few directions (Qi et al., arXiv 2505.21910). Thresholds without a source are ours.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from speech_mt.diagnostics.collapse import ALIKE, UNIFORM
from speech_mt.diagnostics.inspection import LayerNumbers

OUTLIER = 5.0  # times the median of the peers; healthy trainings of 18L-18L models stay below 2.5
VANISHED = 0.05  # of that median: a branch that has all but left the network
STALE = 0.1  # relative difference of ||W_hat|| and |gamma|; 0.02 after an ordinary update at a high rate
CONCENTRATED, LARGE = 0.9, 2.0  # energy in the top singular values, of a head with this times the median norm
SHARP_LOGIT = 20.0  # standard deviation at which even unrelated tokens get one-hot attention; 0.5 at the start
LARGE_LOGIT = 50.0  # where Gemma 2 caps logits (arXiv 2408.00118); QK-Clip begins at 100 (arXiv 2507.20534)
SMOOTHING = 0.9  # share of H's eigenvalues with a positive real part; half of them at the start

ATTENTION_WEIGHTS = ("q_proj", "k_proj", "qk_proj", "v_proj", "out_proj")


class Worry(NamedTuple):
    """What stands out in one layer, or in neighbouring ones."""

    kind: str
    layers: tuple[int, ...]
    where: str  # decoder.layers.3.self_attn head 2
    why: str

    def __str__(self) -> str:
        return f"{self.where}: {self.why}"


class Finding(NamedTuple):
    """What a rule has found in one layer; ``badness`` says in which of several it is worst."""

    row: LayerNumbers
    part: str  # of the row's module: "self_attn", "fc1"; or empty
    badness: float
    why: str
    heads: Sequence[int] = ()  # the worst first


def find_worries(rows: Sequence[LayerNumbers]) -> list[Worry]:
    """All that stands out, rule by rule; [] if nothing does."""
    worries = []
    for rule in RULES:
        groups: dict[tuple[str, str], list[Finding]] = defaultdict(list)
        for finding in rule(rows):
            groups[finding.row.kind, finding.part].append(finding)
        worries += [_worry(run) for group in groups.values() for run in _neighbours(group)]
    return worries


def _neighbours(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings of consecutive layers together."""
    runs: list[list[Finding]] = []
    for finding in findings:
        if runs and finding.row.layer == runs[-1][-1].row.layer + 1:
            runs[-1].append(finding)
        else:
            runs.append([finding])
    return runs


def _worry(run: Sequence[Finding]) -> Worry:
    worst = max(run, key=lambda finding: finding.badness)
    layers = tuple(finding.row.layer for finding in run)
    name, why = worst.row.name, worst.why
    if len(run) > 1:
        name = re.sub(r"layers\.\d+", f"layers.{layers[0]}-{layers[-1]}", name)
    where = f"{name}.{worst.part}" if worst.part else name
    if len(run) > 1:
        where += f", worst in layer {worst.row.layer}"
    if worst.heads:
        where += f" head {worst.heads[0]}"
    if len(worst.heads) > 1:
        others = ", ".join(map(str, sorted(worst.heads[1:])))
        why += f" (also head{'s' * (len(worst.heads) > 2)} {others})"
    return Worry(worst.row.kind, layers, where, why)


# -- rules for weights --------------------------------------------------------------------------------------------


def weight_is_not_finite(rows: Sequence[LayerNumbers]) -> Iterator[Finding]:
    for row in rows:
        for weight, norm in row.spectral_norms.items():
            if math.isnan(norm):
                yield Finding(row, _part(row, weight), 0, "holds NaN or Inf")


def norm_is_far_from_its_peers(rows: Sequence[LayerNumbers]) -> Iterator[Finding]:
    norms: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        for weight, norm in row.spectral_norms.items():
            norms[row.kind, weight] += [norm] * math.isfinite(norm)
    for row in rows:
        for weight, norm in row.spectral_norms.items():
            middle = median(norms[row.kind, weight] or [math.nan])
            why = f"spectral norm {norm:.3g}, where the median of {weight} is {middle:.3g}"
            if norm > OUTLIER * middle:
                yield Finding(row, _part(row, weight), norm, why)
            elif norm < VANISHED * middle:
                yield Finding(row, _part(row, weight), -norm, f"{why}: what it feeds gets next to nothing")


def sigma_is_stale(rows: Sequence[LayerNumbers]) -> Iterator[Finding]:
    for row in rows:
        for weight, gamma in row.gammas.items():
            norm = row.spectral_norms[weight]
            if (difference := abs(norm - abs(gamma))) > STALE * abs(gamma):
                why = f"spectral norm {norm:.3g}, but gamma {gamma:.3g}: u and v are another weight's"
                yield Finding(row, _part(row, weight), difference, why)


def query_key_product_is_large(rows: Sequence[LayerNumbers]) -> Iterator[Finding]:
    norms_of_kind = defaultdict(list)
    for row in rows:
        norms_of_kind[row.kind] += row.per_head.get("query_key_norm", [])
    for row in rows:
        if row.qk_norm or "query_key_norm" not in row.per_head:
            continue
        middle = median(norms_of_kind[row.kind])
        norms, energy = row.per_head["query_key_norm"], row.per_head["energy_concentration"]
        heads = [
            head
            for head in _above(norms, LARGE * middle)
            if norms[head] > OUTLIER * middle or energy[head] > CONCENTRATED
        ]
        if heads:
            norm, rank = norms[heads[0]], row.per_head["effective_rank"][heads[0]]
            why = f"||W_Q W_K^T|| {norm:.3g} is {norm / middle:.2g} times the median, at effective rank {rank:.3g}"
            yield Finding(row, _attention(row), norm, why, heads)


def logits_of_unrelated_tokens_are_sharp(rows: Sequence[LayerNumbers]) -> Iterator[Finding]:
    for row in rows:
        logits = row.per_head.get("typical_logit", [])
        if not row.qk_norm and (heads := _above(logits, SHARP_LOGIT)):
            why = f"logits of unrelated tokens of unit variance deviate by {logits[heads[0]]:.3g}: one-hot attention"
            yield Finding(row, _attention(row), logits[heads[0]], why, heads)


# -- rules for what was seen on data --------------------------------------------------------------------------------


def attention_is_not_finite(rows: Sequence[LayerNumbers]) -> Iterator[Finding]:
    for row in rows:
        heads = [head for head, logit in enumerate(row.per_head.get("max_logit", [])) if not math.isfinite(logit)]
        if heads:
            yield Finding(row, _attention(row), 0, "NaN or Inf among its logits", heads)


def tokens_are_alike(rows: Sequence[LayerNumbers]) -> Iterator[Finding]:
    for row in rows:
        cosine = row.numbers.get("cosine", 0.0)
        if cosine >= ALIKE:
            residual = row.numbers["rank_residual"]
            why = f"tokens are alike (cosine {cosine:.5g}, residual {residual:.2g}): rank collapse"
            share = row.numbers.get("positive_share", 0.0)
            if share > SMOOTHING:
                why += f"; {share:.0%} of the eigenvalues of W_V W_O have a positive real part, which smooths"
            yield Finding(row, "", -residual, why)


def attention_is_uniform(rows: Sequence[LayerNumbers]) -> Iterator[Finding]:
    for row in rows:
        entropies = row.per_head.get("entropy_normalised", [math.nan])
        if min(entropies) >= UNIFORM:
            why = f"attention is uniform in all heads (entropy {min(entropies):.5g} of log(keys)): it chooses nothing"
            yield Finding(row, _attention(row), min(entropies), why)


def logits_are_large(rows: Sequence[LayerNumbers]) -> Iterator[Finding]:
    for row in rows:
        logits = row.per_head.get("max_logit", [])
        if heads := _above(logits, LARGE_LOGIT):
            entropy = row.per_head["entropy_normalised"][heads[0]]
            why = f"largest logit {logits[heads[0]]:.3g}, entropy {entropy:.2g} of log(keys)"
            yield Finding(row, _attention(row), logits[heads[0]], why, heads)


RULES: tuple[Callable[[Sequence[LayerNumbers]], Iterator[Finding]], ...] = (
    weight_is_not_finite,
    attention_is_not_finite,
    tokens_are_alike,
    attention_is_uniform,
    logits_are_large,
    query_key_product_is_large,
    logits_of_unrelated_tokens_are_sharp,
    norm_is_far_from_its_peers,
    sigma_is_stale,
)


def _attention(row: LayerNumbers) -> str:
    return "" if row.kind == "cross" else "self_attn"


def _part(row: LayerNumbers, weight: str) -> str:
    """A weight's name in its row's module."""
    return f"self_attn.{weight}" if weight in ATTENTION_WEIGHTS and row.kind != "cross" else weight


def _above(values: Sequence[float], limit: float) -> list[int]:
    """The heads whose value is above the limit, the largest first."""
    return sorted((head for head, value in enumerate(values) if value > limit), key=lambda head: -values[head])
