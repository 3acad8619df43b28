"""RESULTS.md, its two figures and a copy of the table, from the rows of the study."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from grid import DEPTHS, LEARNING_RATES, METHODS, SURVIVORS_OF, WARMUPS, Result, Results, Trial, longest, read_results
from outcome import ALIKE
from stability_figures import CURVES_OF, draw_curves, draw_heat_map

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError

PEAKED = 0.1  # entropy over log(visible keys)
FAILURES = ("tokens alike", "alike in one stack", "peaked", "other")
COMMAND = "python examples/stability/study.py"


def write_report(table: Path, folder: Path) -> int:
    """Write RESULTS.md, heat_map.png, curves.png and study.csv into ``folder``.

    Raises:
        InputError: the table has no rows.
    """
    results = longest(read_results(table))
    if not results:
        raise InputError(f"{table}: no rows yet; run {COMMAND} first")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "heat_map.png") as temporary:
        draw_heat_map(results).savefig(temporary, dpi=130, format="png")
    curves = draw_curves(results, table.parent)  # None without the runs' folders: the figure that is there stays
    if curves:
        with atomic_path(folder / "curves.png") as temporary:
            curves.savefig(temporary, dpi=110, format="png")
    with atomic_path(folder / "study.csv") as temporary:
        shutil.copyfile(table, temporary)
    with atomic_path(folder / "RESULTS.md") as temporary:
        temporary.write_text(report(results, (folder / "curves.png").exists()), encoding="utf-8")
    print(f"{folder / 'RESULTS.md'}: {len(results)} runs")
    return 0


def report(results: Results, has_curves: bool) -> str:
    """The text of RESULTS.md."""
    parts = [_head(results), "![Training loss of every run](heat_map.png)"]
    for warmup in WARMUPS:
        for depth in sorted({trial.depth for trial in results}):
            chosen = {t: r for t, r in results.items() if (t.depth, t.warmup) == (depth, warmup)}
            if chosen:
                parts.append(_grid_table(chosen, depth, warmup))
    if has_curves:
        depth, lr, warmup = CURVES_OF
        parts.append(
            f"## Curves: {depth}L-{depth}L, learning rate {lr:g}, warm-up {warmup}\n\n"
            "![Loss, entropy and cosine over training](curves.png)"
        )
    parts += [_failures(results), _not_run(results)]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    seeds = Counter(trial.seed for trial in results)
    updates = sorted({trial.max_updates for trial in results})
    commits = sorted({result.commit for result in results.values()})
    machines = sorted({result.machine for result in results.values()})
    hours = sum(result.seconds for result in results.values()) / 3600
    return f"""# Stability study: results

{len(results)} runs of German to English number words, width 64, at most {_some(updates)} updates of 1,600 tokens.
{_outcomes(results.values())}. Seed {_some(sorted(seeds))}.

**One run a cell and seed: the spread is not known.** A small model on a small language for a few minutes says which
methods leave the first plateau at a depth and learning rate; not which translates best, nor what happens at width 512
or after 100,000 updates.

Written by `{COMMAND} --report` from [study.csv](study.csv), which has the command, commit and numbers of each run.
Commit {_some(commits)}. {_some(machines)}: {hours:.1f} hours of training, one core a run, beside other work.

A cell is the outcome and the update at which it was decided, then training loss in bits a token (1.27 is the least that
label smoothing leaves; a model that ignores input and context has about 4.9), then greedy BLEU of 200 test sentences.
[outcome.py](outcome.py) says what the outcomes mean; a run stops as soon as it is decided."""


def _outcomes(results: Iterable[Result]) -> str:
    counts = Counter(result.outcome for result in results)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()).capitalize()


def _some(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _grid_table(results: Mapping[Trial, Result], depth: int, warmup: int) -> str:
    """Methods by learning rates of one depth and schedule."""
    lrs = sorted({trial.lr for trial in results})
    schedule = f"inverse square root, warm-up {warmup}" if warmup else "constant learning rate, no warm-up"
    lines = [
        f"## {depth}L-{depth}L, {schedule}\n",
        "| | " + " | ".join(f"{lr:g}" for lr in lrs) + " |",
        "|---" * (len(lrs) + 1) + "|",
    ]
    for method in METHODS:
        cells = []
        for lr in lrs:
            found = [r for t, r in results.items() if (t.method, t.lr) == (method, lr)]
            cells.append("<br>".join(map(_cell, found)) or "not run")
        if any(cell != "not run" for cell in cells):
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(result: Result) -> str:
    text = f"{result.outcome} {result.updates}"
    if math.isfinite(result.loss):
        text += f", {result.loss:.2f}"
    if math.isfinite(result.bleu):
        text += f", BLEU {result.bleu:.0f}"
    return f"**{text}**" if result.outcome == "solved" else text


def failure(result: Result) -> str:
    """What a run that stalled or diverged looked like at its last measurement: one of :data:`FAILURES`."""
    if min(result.cosine_encoder, result.cosine_decoder) >= ALIKE:
        return "tokens alike"
    if max(result.cosine_encoder, result.cosine_decoder) >= ALIKE:
        return "alike in one stack"
    return "peaked" if result.entropy <= PEAKED else "other"


def _failures(results: Results) -> str:
    """A row a method: how many failed in which way."""
    lines = [
        "## How runs failed\n",
        f"Tokens alike: mean cosine of at least {ALIKE} between the tokens of the last layer, in encoder and decoder",
        f"(rank collapse). Peaked: some layer's attention has less than {PEAKED} of the greatest entropy (entropy",
        "collapse). Logit: median over all runs of the largest attention logit of the training, before softcap.\n",
        "| method | runs | failed | " + " | ".join(FAILURES) + " | logit |",
        "|---" * (len(FAILURES) + 4) + "|",
    ]
    for method in METHODS:
        runs = [result for trial, result in results.items() if trial.method == method]
        ways = Counter(failure(result) for result in runs if result.outcome in ("stalled", "diverged"))
        logits = [result.max_logit for result in runs if math.isfinite(result.max_logit)]
        if runs:
            numbers = [len(runs), ways.total(), *(ways[way] for way in FAILURES)]
            logit = f"{median(logits):.1f}" if logits else "-"
            lines.append(f"| {method} | {' | '.join(map(str, numbers))} | {logit} |")
    return "\n".join(lines)


def _not_run(results: Results) -> str:
    """The cells of the whole grid without a row."""
    lines = []
    for depth in sorted(DEPTHS):
        for warmup in WARMUPS:
            missing = [
                (method, lr)
                for method in METHODS
                for lr in sorted(LEARNING_RATES)
                if not any((t.method, t.depth, t.lr, t.warmup) == (method, depth, lr, warmup) for t in results)
            ]
            if missing:
                total = len(METHODS) * len(LEARNING_RATES)
                only = f" (only what learns at {SURVIVORS_OF[depth]}L is tried)" if depth in SURVIVORS_OF else ""
                lines.append(f"- {depth}L-{depth}L, warm-up {warmup}: {len(missing)} of {total}{only}")
    body = "\n".join(lines) or "Nothing: the grid is complete."
    rest = f"Other seeds, tasks and widths, and GPUs: not run. `{COMMAND}` goes on where the table ends."
    return f"## Not run\n\n{body}\n\n{rest}"
