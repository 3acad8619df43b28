"""RESULTS.md, its figures and copies of the tables, from the rows of the study."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from controls import CONTROLS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from trials import DEPTH_OF_SHARES, TASKS, Layer, Result, Score, Spoilt, Trial, Value

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError
from speech_mt.experiments.table import read_table
from speech_mt.plotting.figures import RUN_COLOURS, STYLE, WIDTH

COMMAND = "python examples/oversmoothing/oversmoothing.py"
NOT_RUN = "not run"
Results = Mapping[Trial, Result]
Layers = dict[Trial, dict[Layer, Value]]


def write_report(out: Path, folder: Path) -> int:
    """Write RESULTS.md, the figures and the tables into ``folder``.

    Raises:
        InputError: there are no rows.
    """
    results = read_table(out / "study.csv", Trial, Result)
    if not results:
        raise InputError(f"{out / 'study.csv'}: no rows yet; run {COMMAND} first")
    spoilt = read_table(out / "spoilt.csv", Spoilt, Score)
    layers = {trial: read_table(out / trial.name / "layers.csv", Layer, Value) for trial in results}
    figures = {
        "by_layer.png": draw_by_layer(layers),
        "over_training.png": draw_over_training(layers),
        "spoilt.png": draw_spoilt(results, spoilt),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        with atomic_path(folder / name) as temporary:
            figure.savefig(temporary, dpi=110, format="png")
    for name in ("study.csv", "spoilt.csv"):
        if (out / name).exists():
            with atomic_path(folder / name) as temporary:
                shutil.copyfile(out / name, temporary)
    with atomic_path(folder / "RESULTS.md") as temporary:
        temporary.write_text(report(results), encoding="utf-8")
    print(f"{folder / 'RESULTS.md'}: {len(results)} runs")
    return 0


def report(results: Results) -> str:
    """The text of RESULTS.md."""
    parts = [_head(results)]
    for name, task in TASKS.items():
        of_task = {trial: result for trial, result in results.items() if trial.task == name}
        if of_task:
            better = "more" if task.more_is_better else "less"
            parts.append(f"## {task.title[0].upper()}{task.title[1:]}: {task.score} ({better} is better)")
            whole = {t: r for t, r in of_task.items() if t.share == 1}
            shares = {t: r for t, r in of_task.items() if t.layers == DEPTH_OF_SHARES}
            table = _table(whole, lambda t: t.layers, lambda x: f"{x}L")
            note = "All of the training data. In brackets: cosine between tokens of the last encoder layer."
            parts.append(f"{note}\n\n{table}")
            if len({trial.share for trial in shares}) > 1:
                text = _table(shares, lambda t: t.share, lambda x: f"{100 * x:g} %")
                parts.append(f"Shares of the training data, {DEPTH_OF_SHARES}L.\n\n{text}")
    parts += [
        "## Spoilt test sets\n\nTrained on clean data, the deepest models. The first point is the clean test set.\n\n"
        "![Score by corruption and level](spoilt.png)",
        "## Smoothing by layer, after training\n\nHFC/LFC over sqrt(tokens - 1) of each layer's output, and dashed "
        "that of the simplified model X + A X H with the layers' measured attention and weights, from the same input. "
        "Below, the share of channels whose dominating eigenvalue is that of the constant vector, so that they are to "
        "smooth.\n\n![HFC/LFC and predicted share by layer](by_layer.png)",
        "## Smoothing over training\n\nOf the last encoder layer.\n\n![HFC/LFC over training](over_training.png)",
        f"## Not run\n\n{_not_run(results)}",
    ]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    def some(values: object) -> str:
        return ", ".join(map(str, sorted(set(values))))

    return f"""# Oversmoothing study: results

{len(results)} runs, seed {some(t.seed for t in results)}. **One run a cell and seed: the spread is not known.** Small
models, minutes of training: differences say nothing of large ones.

Written by `{COMMAND} --report` from [study.csv](study.csv) and [spoilt.csv](spoilt.csv), which have the command, commit
and numbers of each run. Commit {some(r.commit for r in results.values())}; {some(r.machine for r in results.values())},
beside other work. Models are pre-LN but for DeepNorm."""


def _table(results: Results, column_of: Callable[[Trial], float], name: Callable[[float], str]) -> str:
    """Controls by columns: score, and in brackets the cosine between tokens of the last encoder layer."""
    columns = sorted({column_of(trial) for trial in results})
    lines = ["| | " + " | ".join(map(name, columns)) + " |", "|---" * (len(columns) + 1) + "|"]
    for control in CONTROLS:
        cells = []
        for column in columns:
            found = [r for t, r in results.items() if (t.control, column_of(t)) == (control, column)]
            cells.append("<br>".join(map(_cell, found)) or NOT_RUN)
        if set(cells) != {NOT_RUN}:
            lines.append(f"| {control} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(result: Result) -> str:
    if math.isnan(result.score):
        return "diverged"
    return f"{result.score:.1f}" + (f" ({result.cosine:.2f})" if math.isfinite(result.cosine) else "")


def _not_run(results: Results) -> str:
    missing = [
        f"{name}: {', '.join(gone)}"
        for name in TASKS
        if (gone := [c for c in CONTROLS if not any((t.task, t.control) == (name, c) for t in results)])
    ]
    rest = "Other seeds, sizes and tasks, and GPUs. What a control costs: benchmarks/oversmoothing_cost.py."
    return "\n".join(f"- {line}" for line in missing) + ("\n\n" if missing else "") + rest


# -- figures ----------------------------------------------------------------------------------------------------------


def _panels(rows: int, columns: int, height: float) -> tuple[Figure, np.ndarray]:
    figure = Figure(figsize=(max(WIDTH * columns / 4, 6.5), 1.0 + rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _style(control: str) -> dict[str, object]:
    number = list(CONTROLS).index(control)
    return {"color": RUN_COLOURS[number % 7], "marker": "os^"[number // 7], "markersize": 3, "linewidth": 1.3}


def _legend(figure: Figure, controls: Sequence[str], panel: Axes) -> None:
    handles = [panel.plot([], [], label=control, **_style(control))[0] for control in controls]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)


def _shown(layers: Mapping[Trial, object]) -> list[tuple[str, list[Trial]]]:
    """Of each task, the deepest models on all of the data, the first seed of each control."""
    shown = []
    for task in TASKS:
        whole = [trial for trial in layers if trial.task == task and trial.share == 1]
        deepest = max((trial.layers for trial in whole), default=0)
        first: dict[str, Trial] = {}
        for trial in whole:
            if trial.layers == deepest:
                first.setdefault(trial.control, trial)
        if first:
            shown.append((task, list(first.values())))
    return shown


def _by_layer(rows: Mapping[Layer, Value], measure: str, stack: str) -> tuple[list[int], list[float]]:
    """At the last update at which it was measured."""
    found = [key for key in rows if (key.measure, key.stack) == (measure, stack)]
    last = max((key.update for key in found), default=0)
    keys = sorted((key for key in found if key.update == last), key=lambda key: key.layer)
    return [key.layer + 1 for key in keys], [rows[key].value for key in keys]


def draw_by_layer(layers: Layers) -> Figure:
    """Measured and predicted HFC/LFC, and the predicted share of smoothing channels, a column a task and stack."""
    stacks = [
        (task, stack, trials)
        for task, trials in _shown(layers)
        for stack in ("encoder", "decoder")
        if any(key.stack == stack for trial in trials for key in layers[trial])
    ]
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(2, max(1, len(stacks)), 2.6)
        for (upper, lower), (task, stack, trials) in zip(panels.T, stacks, strict=False):
            upper.set_title(f"{task}, {trials[0].layers}L {stack}", weight="bold")
            upper.set_yscale("log")
            for trial in trials:
                style = _style(trial.control)
                upper.plot(*_by_layer(layers[trial], "hfc_lfc", stack), **style)
                upper.plot(
                    *_by_layer(layers[trial], "predicted_hfc_lfc", stack), **style | {"linestyle": "--"}, alpha=0.5
                )
                lower.plot(*_by_layer(layers[trial], "predicted_smoothing", stack), **style)
            lower.set_ylim(-0.05, 1.05)
            lower.set_xlabel("layer")
            for panel in (upper, lower):
                panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panels[0, 0].set_ylabel("HFC/LFC; dashed: predicted")
        panels[1, 0].set_ylabel("share of channels to smooth")
        _legend(figure, list(dict.fromkeys(t.control for *_, trials in stacks for t in trials)), panels[0, 0])
    return figure


def draw_over_training(layers: Layers) -> Figure:
    """HFC/LFC of the last encoder layer, a panel a task."""
    shown = _shown(layers)
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(1, max(1, len(shown)), 3.0)
        for panel, (task, trials) in zip(panels[0], shown, strict=False):
            panel.set_title(f"{task}, {trials[0].layers}L", weight="bold")
            panel.set_xlabel("update")
            panel.set_yscale("log")
            for trial in trials:
                keys = [
                    k
                    for k in layers[trial]
                    if (k.measure, k.stack, k.layer) == ("hfc_lfc", "encoder", trial.layers - 1)
                ]
                keys.sort(key=lambda key: key.update)
                values = [layers[trial][key].value for key in keys]
                panel.plot([key.update for key in keys], values, **_style(trial.control) | {"marker": ""})
        panels[0, 0].set_ylabel("HFC/LFC, last encoder layer")
        _legend(figure, list(dict.fromkeys(t.control for _, trials in shown for t in trials)), panels[0, 0])
    return figure


def draw_spoilt(results: Results, spoilt: Mapping[Spoilt, Score]) -> Figure:
    """Score by level, a panel a task and corruption; the first point is the clean test set."""
    kinds = [(task, trials, kind) for task, trials in _shown(results) for kind in TASKS[task].corruptions]
    with matplotlib.rc_context(STYLE):
        columns = min(4, max(1, len(kinds)))
        figure, panels = _panels(max(1, math.ceil(len(kinds) / columns)), columns, 2.6)
        for panel, (task, trials, kind) in zip(panels.flat, kinds, strict=False):
            levels = TASKS[task].corruptions[kind]
            panel.set_title(f"{task}, {trials[0].layers}L: {kind}", weight="bold")
            panel.set_xticks(range(len(levels) + 1), ["clean", *(f"{level:g}" for level in levels)])
            panel.set_ylabel(TASKS[task].score)
            for trial in trials:
                scores = [results[trial].score]
                for level in levels:
                    row = spoilt.get(Spoilt(**vars(trial), corruption=kind, level=float(level)))
                    scores.append(math.nan if row is None else row.score)
                panel.plot(scores, **_style(trial.control))
        for panel in panels.flat[len(kinds) :]:
            panel.remove()
        _legend(figure, list(dict.fromkeys(t.control for _, trials, _ in kinds for t in trials)), panels[0, 0])
    return figure
