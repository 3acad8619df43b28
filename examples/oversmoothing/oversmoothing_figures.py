"""The figures of the study: smoothing by layer and over training, and scores on spoilt test sets."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean

import matplotlib
import numpy as np
from controls import CONTROLS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from trials import TASKS, Layer, Result, Score, Spoilt, Trial, Value

from speech_mt.plotting.figures import RUN_COLOURS, STYLE, WIDTH

Layers = dict[Trial, dict[Layer, Value]]
MEASURES = {  # measure of a layer -> heading, scale
    "hfc_lfc": ("HFC/LFC", "log"),
    "cosine": ("cosine of tokens", "linear"),
    "rank_residual": ("rank residual", "log"),
    "predicted_smoothing": ("share of channels to smooth", "linear"),
    "condition_number": ("condition number of H", "log"),
}


def deepest(trials: Iterable[Trial], task: str) -> list[Trial]:
    """Of the task's models on all of the data the deepest, the first seed of each control."""
    whole = _on_all_data(trials, task)
    layers = max((trial.layers for trial in whole), default=0)
    return [seeds[0] for seeds in _by_control(whole, layers).values()]


def most_run(trials: Iterable[Trial], task: str) -> dict[str, list[Trial]]:
    """Control -> its seeds, on all of the data, at the depth that has the most runs; the deepest of such."""
    whole = _on_all_data(trials, task)
    depths = Counter(trial.layers for trial in whole)
    layers = max(depths, key=lambda depth: (depths[depth], depth), default=0)
    return _by_control(whole, layers)


def _on_all_data(trials: Iterable[Trial], task: str) -> list[Trial]:
    return [trial for trial in trials if trial.task == task and trial.share == 1]


def _by_control(trials: Iterable[Trial], layers: int) -> dict[str, list[Trial]]:
    seeds: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.layers == layers:
            seeds.setdefault(trial.control, []).append(trial)
    return seeds


def draw_by_layer(layers: Layers) -> Figure:
    """After training: a row a measure, a column a stack of a task's deepest models; predictions are dashed."""
    stacks = [
        (task, stack, trials)
        for task in TASKS
        if (trials := deepest(layers, task))
        for stack in ("encoder", "decoder")
        if any(key.stack == stack for trial in trials for key in layers[trial])
    ]

    def draw(panel: Axes, trial: Trial, measure: str, stack: str, **style: object) -> None:
        rows = {key: value for key, value in layers[trial].items() if (key.measure, key.stack) == (measure, stack)}
        last = max((key.update for key in rows), default=0)
        keys = sorted((key for key in rows if key.update == last), key=lambda key: key.layer)
        panel.plot([key.layer + 1 for key in keys], [rows[key].value for key in keys], **style)

    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(len(MEASURES), len(stacks), 2.2)
        for column, (task, stack, trials) in zip(panels.T, stacks, strict=True):
            column[0].set_title(f"{task}, {trials[0].layers}L {stack}", weight="bold")
            column[-1].set_xlabel("layer")
            for panel, measure in zip(column, MEASURES, strict=True):
                panel.set_yscale(MEASURES[measure][1])
                panel.xaxis.set_major_locator(MaxNLocator(integer=True))
                for trial in trials:
                    style = _style(trial.control)
                    draw(panel, trial, measure, stack, **style)
                    draw(panel, trial, f"predicted_{measure}", stack, **style | {"linestyle": "--", "alpha": 0.5})
        for panel, (heading, _) in zip(panels[:, 0], MEASURES.values(), strict=True):
            panel.set_ylabel(heading)
        _legend(figure, [trial.control for *_, trials in stacks for trial in trials], panels[0, 0])
    return figure


def draw_over_training(layers: Layers) -> Figure:
    """Of the last encoder layer: a row a measure, a column a task's deepest models."""
    shown = [(task, trials) for task in TASKS if (trials := deepest(layers, task))]
    measures = ("hfc_lfc", "cosine", "rank_residual")
    with matplotlib.rc_context(STYLE):
        figure, panels = _panels(len(measures), len(shown), 2.2)
        for column, (task, trials) in zip(panels.T, shown, strict=True):
            column[0].set_title(f"{task}, {trials[0].layers}L", weight="bold")
            column[-1].set_xlabel("update")
            for panel, measure in zip(column, measures, strict=True):
                panel.set_yscale(MEASURES[measure][1])
                for trial in trials:
                    place = (measure, "encoder", trial.layers - 1)
                    rows = {k: v for k, v in layers[trial].items() if (k.measure, k.stack, k.layer) == place}
                    curve = sorted((key.update, value.value) for key, value in rows.items())
                    panel.plot(*zip(*curve, strict=True), **_style(trial.control) | {"marker": ""})
        for panel, measure in zip(panels[:, 0], measures, strict=True):
            panel.set_ylabel(MEASURES[measure][0])
        _legend(figure, [trial.control for _, trials in shown for trial in trials], panels[0, 0])
    return figure


def draw_spoilt(results: Mapping[Trial, Result], spoilt: Mapping[Spoilt, Score]) -> Figure:
    """Score by level, mean of the seeds, a panel a task and corruption; the first point is the clean test set."""
    kinds = [
        (task, seeds, kind) for task in TASKS if (seeds := most_run(results, task)) for kind in TASKS[task].corruptions
    ]

    def score(trial: Trial, kind: str, level: float) -> float:
        row = spoilt.get(trial.spoilt(kind, level))
        return math.nan if row is None else row.score

    with matplotlib.rc_context(STYLE):
        columns = min(4, max(1, len(kinds)))
        figure, panels = _panels(math.ceil(len(kinds) / columns), columns, 2.6)
        for panel, (task, seeds, kind) in zip(panels.flat, kinds, strict=False):
            levels = TASKS[task].corruptions[kind]
            depth = next(iter(seeds.values()))[0].layers
            panel.set_title(f"{task}, {depth}L: {kind}", weight="bold")
            panel.set_xticks(range(len(levels) + 1), ["clean", *(f"{level:g}" for level in levels)])
            panel.set_ylabel(TASKS[task].score)
            for control, trials in seeds.items():
                clean = mean(results[trial].score for trial in trials)
                panel.plot(
                    [clean, *(mean(score(trial, kind, level) for trial in trials) for level in levels)],
                    **_style(control),
                )
        for panel in panels.flat[len(kinds) :]:
            panel.remove()
        _legend(figure, [control for _, seeds, _ in kinds for control in seeds], panels[0, 0])
    return figure


def _panels(rows: int, columns: int, height: float) -> tuple[Figure, np.ndarray]:
    rows, columns = max(1, rows), max(1, columns)
    figure = Figure(figsize=(max(WIDTH * columns / 4, 6.5), 1.0 + rows * height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _style(control: str) -> dict[str, object]:
    number = list(CONTROLS).index(control)
    return {"color": RUN_COLOURS[number % 7], "marker": "os^"[number // 7], "markersize": 3, "linewidth": 1.3}


def _legend(figure: Figure, controls: Sequence[str], panel: Axes) -> None:
    shown = [control for control in CONTROLS if control in controls]
    handles = [panel.plot([], [], label=control, **_style(control))[0] for control in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
