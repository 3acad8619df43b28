"""One quantity as a heat map, layer by update: where in depth and time something begins."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from speech_mt.plotting.figures import FAINT, STYLE, WIDTH
from speech_mt.plotting.runs import Run


def make_heat_maps(runs: Sequence[Run], quantity: str) -> Figure:
    """Layer (down) by update (right) of a quantity such as ``cosine/encoder``: a panel a run, one colour scale.

    Grey: not measured, or not finite.
    """
    layers = [run.layers(quantity) for run in runs]
    depth = max(1, *(values.shape[1] for _, values in layers))
    finite = np.concatenate([values[np.isfinite(values)] for _, values in layers])
    norm = Normalize(finite.min(), finite.max()) if finite.size else Normalize(0, 1)
    colours = matplotlib.colormaps["cividis"].with_extremes(bad="#cccccc")
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(WIDTH, 1.1 + 0.08 * min(max(depth, 6), 60)), layout="constrained")
        panels = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
        for panel, run, (steps, values) in zip(panels, runs, layers, strict=True):
            panel.set_title(run.label, weight="bold")
            panel.set_xlabel("update")
            if not steps.size:
                panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", color=FAINT)
                continue
            edges = cell_edges(steps), np.arange(values.shape[1] + 1) - 0.5
            cells = np.ma.masked_invalid(values.T)
            panel.pcolormesh(*edges, cells, cmap=colours, norm=norm, rasterized=True)
        panels[0].set(ylabel="layer", ylim=(depth - 0.5, -0.5))
        panels[0].yaxis.set_major_locator(MaxNLocator(6, integer=True))
        panels[0].xaxis.set_major_locator(MaxNLocator(4, integer=True))
        figure.colorbar(ScalarMappable(norm, colours), ax=list(panels), pad=0.01, aspect=12)
    return figure


def cell_edges(steps: np.ndarray) -> np.ndarray:
    """Borders (N + 1,) half-way between ascending steps (N,); the outer cells are as wide on either side."""
    if steps.size == 1:
        return steps[0] + np.array([-0.5, 0.5])
    middle = (steps[1:] + steps[:-1]) / 2
    return np.concatenate([[2 * steps[0] - middle[0]], middle, [2 * steps[-1] - middle[-1]]])
