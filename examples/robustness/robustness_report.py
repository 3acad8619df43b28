"""RESULTS.md, its figure and a copy of the table, from the rows of the study."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize, to_rgba
from matplotlib.figure import Figure
from robustness import (
    DIVERGED,
    LEARNING_RATES,
    LEARNS_BELOW,
    METHODS,
    OPTIMIZERS,
    SOLVED_BELOW,
    STALLED,
    WARMUPS,
    Result,
    Results,
    Trial,
)

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError
from speech_mt.experiments.table import read_table
from speech_mt.plotting.figures import INK, STYLE, WIDTH

COMMAND = "python examples/robustness/robustness.py"
WER, COLOURS = Normalize(0, 100), matplotlib.colormaps["cividis_r"]
DARK_RED, GREY = "#7f1d1d", "#ececec"


def write_report(table: Path, folder: Path) -> int:
    """Write RESULTS.md, heat_map.png and robustness.csv into ``folder``.

    Raises:
        InputError: the table has no rows.
    """
    results: Results = read_table(table, Trial, Result)
    if not results:
        raise InputError(f"{table}: no rows yet; run {COMMAND} first")
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_path(folder / "heat_map.png") as temporary:
        draw(results).savefig(temporary, dpi=130, format="png")
    with atomic_path(folder / "robustness.csv") as temporary:
        shutil.copyfile(table, temporary)
    with atomic_path(folder / "RESULTS.md") as temporary:
        temporary.write_text(report(results), encoding="utf-8")
    print(f"{folder / 'RESULTS.md'}: {len(results)} runs")
    return 0


def report(results: Results) -> str:
    """The text of RESULTS.md."""
    seeds = sorted({trial.seed for trial in results})
    updates = sorted({trial.updates for trial in results})
    commits = sorted({result.commit for result in results.values()})
    machines = sorted({result.machine for result in results.values()})
    whole = len(METHODS) * len(WARMUPS) * sum(map(len, LEARNING_RATES.values()))
    hours = sum(result.minutes for result in results.values()) / 60
    parts = [
        f"""# Learning rates that train a speech recogniser: results

{len(results)} runs of a 12-layer CTC encoder of width 64 on spoken digits (FSDD), {_some(updates)} updates of 24 clips.
Seed {_some(seeds)}; the whole grid is {whole} runs a seed. WER in percent of 300 clips held out from training, greedy,
after the last update.

**A small model on a small task for a few minutes**: it says which learning rates train at all, not which method has
the lower error rate in the end.

Written by `{COMMAND} --report` from [robustness.csv](robustness.csv), which has the command, commit and numbers of each
run. Commit {_some(commits)}. {_some(machines)}: {hours:.1f} hours of updates, one core a run, beside other work.

A cell is the WER of each seed; **bold**: below {SOLVED_BELOW:g} %; *stalled*: {LEARNS_BELOW:g} % or more (one word for
every clip makes 90, none 100); diverged: a gradient that is not finite.""",
        "![WER by learning rate](heat_map.png)",
    ]
    for optimizer in OPTIMIZERS:
        chosen = {trial: result for trial, result in results.items() if trial.optimizer == optimizer}
        if chosen:
            parts.append(f"## {optimizer}\n\n{_table(chosen)}")
    parts.append(f"## Range of learning rates\n\n{_ranges(results)}")
    return "\n\n".join(parts) + "\n"


def _some(values: list) -> str:
    return ", ".join(map(str, values))


def _rows(results: Mapping[Trial, Result]) -> list[tuple[str, int]]:
    """(method, warm-up) of what was run, in the order of the study."""
    warmups = sorted({trial.warmup for trial in results}, reverse=True)
    pairs = [(method, warmup) for warmup in warmups for method in METHODS]
    return [pair for pair in pairs if any((t.method, t.warmup) == pair for t in results)]


def _label(method: str, warmup: int) -> str:
    return f"{method}, " + (f"warm-up {warmup}" if warmup else "no warm-up")


def _table(results: Mapping[Trial, Result]) -> str:
    lrs = sorted({trial.lr for trial in results})
    lines = ["| | " + " | ".join(f"{lr:g}" for lr in lrs) + " |", "|---" * (len(lrs) + 1) + "|"]
    for method, warmup in _rows(results):
        cells = []
        for lr in lrs:
            found = [r for t, r in results.items() if (t.method, t.warmup, t.lr) == (method, warmup, lr)]
            cells.append(", ".join(map(_cell, found)) or "not run")
        lines.append(f"| {_label(method, warmup)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(result: Result) -> str:
    if result.outcome == DIVERGED:
        return DIVERGED
    text = f"{result.wer:.1f}"
    return f"*stalled* {text}" if result.outcome == STALLED else f"**{text}**" if result.wer < SOLVED_BELOW else text


def _ranges(results: Results) -> str:
    """Of each method and optimizer: how many learning rates of those tried train, by the worst of their seeds."""
    optimizers = [name for name in OPTIMIZERS if any(trial.optimizer == name for trial in results)]
    lines = [
        f"Learning rates with a WER below {LEARNS_BELOW:g} % for every seed, of those tried.\n",
        "| | " + " | ".join(optimizers) + " |",
        "|---" * (len(optimizers) + 1) + "|",
    ]
    for method, warmup in _rows(results):
        cells = []
        for optimizer in optimizers:
            worst: dict[float, bool] = {}
            for trial, result in results.items():
                if (trial.method, trial.warmup, trial.optimizer) == (method, warmup, optimizer):
                    learns = result.outcome not in (DIVERGED, STALLED)
                    worst[trial.lr] = worst.get(trial.lr, True) and learns
            cells.append(f"{sum(worst.values())} of {len(worst)}" if worst else "not run")
        lines.append(f"| {_label(method, warmup)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(results: Results) -> Figure:
    """A panel an optimizer: methods and warm-ups down, learning rates right, colour the worst seed's WER."""
    optimizers = [name for name in OPTIMIZERS if any(trial.optimizer == name for trial in results)]
    rows = _rows(results)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(WIDTH, 1.2 + 0.4 * len(rows)), layout="constrained")
        panels = figure.subplots(1, len(optimizers), sharey=True, squeeze=False)[0]
        for panel, optimizer in zip(panels, optimizers, strict=True):
            panel.set_title(optimizer, weight="bold")
            _draw_cells(panel, {t: r for t, r in results.items() if t.optimizer == optimizer}, rows)
        panels[0].set_yticks(range(len(rows)), [_label(*row) for row in rows])
        bar = figure.colorbar(ScalarMappable(WER, COLOURS), ax=list(panels), pad=0.01, aspect=25)
        bar.set_label("WER (%); dark red: diverged")
    return figure


def _draw_cells(panel: Axes, results: Mapping[Trial, Result], rows: list[tuple[str, int]]) -> None:
    lrs = sorted({trial.lr for trial in results})
    picture = np.empty((len(rows), len(lrs), 4))
    for i, (method, warmup) in enumerate(rows):
        for j, lr in enumerate(lrs):
            found = [r for t, r in results.items() if (t.method, t.warmup, t.lr) == (method, warmup, lr)]
            worst = max(found, key=lambda r: math.inf if math.isnan(r.wer) else r.wer, default=None)
            picture[i, j] = colour = _colour(worst)
            dark = float(np.dot(colour[:3], (0.299, 0.587, 0.114))) < 0.5
            text = "" if worst is None else DIVERGED if math.isnan(worst.wer) else f"{worst.wer:.0f}"
            panel.text(j, i, text, ha="center", va="center", size=7, color="white" if dark else INK)
    panel.imshow(picture, aspect="auto")
    panel.set_xticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
    panel.set_xlabel("learning rate")
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def _colour(result: Result | None) -> tuple[float, ...]:
    if result is None:
        return to_rgba(GREY)
    return to_rgba(DARK_RED) if math.isnan(result.wer) else COLOURS(WER(result.wer))
