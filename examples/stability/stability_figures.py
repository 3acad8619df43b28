"""The two figures of the study: a heat map of every run, and the curves of one setting."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import matplotlib
import numpy as np
from grid import METHODS, Result, Results, Trial
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from speech_mt.errors import InputError
from speech_mt.plotting.figures import FAINT, INK, RUN_COLOURS, STYLE, WIDTH
from speech_mt.plotting.runs import Run, load_run

LOSS = Normalize(1.27, 5.0)  # from the least possible to ignoring everything
COLOURS = matplotlib.colormaps["cividis_r"]
DIVERGED, NOT_RUN = "#7f1d1d", "#ececec"
CURVES_OF = (18, 2e-3, 100)  # depth, learning rate, warm-up
CURVES = (
    ("loss", "Training loss (bits a token)"),
    ("entropy_normalised/decoder", "Entropy of self-attention ÷ log(keys),\nlast decoder layer; 1 = uniform"),
    ("cosine/encoder", "Cosine between tokens,\nlast encoder layer; 1 = all alike"),
)


def draw_heat_map(results: Results) -> Figure:
    """Methods (down) by learning rates (right), a panel a depth and schedule; colour is the training loss.

    Of several seeds the worst is drawn.
    """
    depths = sorted({trial.depth for trial in results})
    warmups = sorted({trial.warmup for trial in results}, reverse=True)
    lrs = sorted({trial.lr for trial in results})
    methods = [method for method in METHODS if any(trial.method == method for trial in results)]
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        height = 0.9 + len(warmups) * (0.5 + 0.34 * len(methods))
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        panels = figure.subplots(len(warmups), len(depths), sharex=True, sharey=True, squeeze=False)
        for row, warmup in zip(panels, warmups, strict=True):
            for panel, depth in zip(row, depths, strict=True):
                cells = _worst({t: r for t, r in results.items() if (t.depth, t.warmup) == (depth, warmup)})
                panel.set_title(
                    f"{depth}L-{depth}L, " + (f"warm-up {warmup}" if warmup else "no warm-up"), weight="bold"
                )
                _draw_cells(panel, cells, methods, lrs)
        for panel in panels[-1]:
            panel.set_xticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
            panel.set_xlabel("learning rate")
        panels[0, 0].set_yticks(range(len(methods)), methods)
        panels[0, 0].set_ylim(len(methods) - 0.5, -0.5)
        bar = figure.colorbar(ScalarMappable(LOSS, COLOURS), ax=panels, pad=0.01, aspect=30, extend="max")
        bar.set_label("last training loss (bits a token); dark red: diverged, grey: not run")
    return figure


def _worst(results: Mapping[Trial, Result]) -> dict[tuple[str, float], Result]:
    cells: dict[tuple[str, float], Result] = {}
    for trial, result in results.items():
        other = cells.get((trial.method, trial.lr))
        if other is None or math.isnan(result.loss) or result.loss > other.loss:
            cells[trial.method, trial.lr] = result
    return cells


def _draw_cells(panel: Axes, cells: Mapping[tuple[str, float], Result], methods: list[str], lrs: list[float]) -> None:
    picture = np.empty((len(methods), len(lrs), 4))
    for i, method in enumerate(methods):
        for j, lr in enumerate(lrs):
            result = cells.get((method, lr))
            picture[i, j] = colour = _colour(result)
            dark = float(np.dot(colour[:3], (0.299, 0.587, 0.114))) < 0.5
            weight = "bold" if result and result.outcome == "solved" else "normal"
            style = {"color": "white" if dark else INK, "weight": weight, "size": 6.8, "linespacing": 1.15}
            panel.text(j, i, _text(result), ha="center", va="center", **style)
    panel.imshow(picture, aspect="auto")
    panel.set_xticks(np.arange(1, len(lrs)) - 0.5, minor=True)
    panel.set_yticks(np.arange(1, len(methods)) - 0.5, minor=True)
    panel.grid(which="minor", color="white", linewidth=1.2)
    panel.tick_params(which="both", length=0)
    panel.spines[:].set_visible(False)


def _colour(result: Result | None) -> tuple[float, ...]:
    if result is None:
        return matplotlib.colors.to_rgba(NOT_RUN)
    return matplotlib.colors.to_rgba(DIVERGED) if result.outcome == "diverged" else COLOURS(LOSS(result.loss))


def _text(result: Result | None) -> str:
    if result is None:
        return "not run"
    numbers = [f"{result.loss:.2f}"] if math.isfinite(result.loss) else []
    numbers += [f"BLEU {result.bleu:.0f}"] if math.isfinite(result.bleu) else []
    return f"{result.outcome} {result.updates}\n{' · '.join(numbers)}".strip()


def draw_curves(results: Results, out: Path) -> Figure | None:
    """Loss, entropy and cosine over training of every method in the setting CURVES_OF; None if it was not run."""
    runs = {}
    for trial in results:
        if (trial.depth, trial.lr, trial.warmup) == CURVES_OF and trial.method not in runs:
            try:
                runs[trial.method] = load_run(out / trial.name, trial.method)
            except InputError:  # diverged before anything was logged, or the folder is gone
                continue
    if not runs:
        return None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 3.9), layout="constrained")
        panels = figure.subplots(1, len(CURVES), sharex=True)
        for panel, (quantity, heading) in zip(panels, CURVES, strict=True):
            panel.set_title(heading, weight="bold")
            panel.set_xlabel("update")
            for method in (method for method in METHODS if method in runs):
                steps, values = _curve(runs[method], quantity)
                number = list(METHODS).index(method)
                style = {"color": RUN_COLOURS[number % 7], "linestyle": "-" if number < 7 else "--"}
                panel.plot(steps, values, label=method, linewidth=1.8, **style)
        panels[0].axhline(1.27, color=FAINT, linewidth=0.8, linestyle=":")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=5)
    return figure


def _curve(run: Run, quantity: str) -> tuple[np.ndarray, np.ndarray]:
    if "/" not in quantity:
        return run.scalar(quantity)
    steps, values = run.layers(quantity)
    return steps, values[:, -1]
