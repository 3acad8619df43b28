"""Several runs side by side: loss, gradient norm, and every quantity per layer, coloured by depth."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import LogLocator, MaxNLocator

from speech_mt.plotting.runs import Run, Series

# Okabe and Ito's colours, which colour-blind readers can tell apart, in an order that keeps contrast on white
RUN_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DEPTH_COLOURS = ListedColormap(matplotlib.colormaps["plasma"](np.linspace(0.0, 0.87, 256)), "depth")
INK, FAINT = "#222222", "#8a8a8a"
STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "text.color": INK,
    "text.parse_math": False,  # a run may be called anything
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": "white",
}
VALIDATION = {"mfc": "white", "ms": 5.5, "mew": 1.5, "zorder": 3}

# inches
WIDTH, LEFT, RIGHT = 11.4, 0.8, 0.8
TITLE, LEGEND, SCALARS, SCALARS_PANEL = 0.35, 0.3, 2.6, 1.9
LAYERS, LAYERS_PANEL = 2.45, 1.4  # a row with its headings, and the panels alone

WIDE = 1000.0  # a quantity of layers beyond it is drawn on a logarithmic axis, linear near 0
COLUMNS, LEGEND_COLUMNS = 6, 4  # side by side at most


class Quantity(NamedTuple):
    """How a quantity is drawn: its heading and the least limits of the y axis."""

    name: str
    heading: str
    limits: tuple[float, float] | None = None


QUANTITIES = (
    Quantity("entropy_normalised", "Attention entropy ÷ log(visible keys); 1 = uniform attention", (0, 1)),
    Quantity("cosine", "Cosine between tokens; 1 = all tokens alike", (0, 1)),
    Quantity("max_logit", "Largest attention logit"),
    Quantity("spectral_norm", "Spectral norm of the weights"),
    Quantity("gamma", "Gamma, the learned scale"),
)
KINDS = ("encoder", "decoder", "cross")


class Row(NamedTuple):
    """A run's row of panels: (quantity, kind) of each, its run and its run's colour."""

    columns: list[tuple[Quantity, str]]
    run: Run
    colour: str


def make_figure(runs: Sequence[Run], title: str | None = None) -> Figure:
    """The figure of one or several runs.

    The first row shows training loss (line), validation loss (circles) and gradient norm of all runs; a dotted
    line stands where the first warning of a collapse came. Below,
    each run has a row with one panel a quantity and kind, one line a layer coloured by depth, on axes that
    all runs share. What no run logged is left out. Values that are not finite leave a gap, marked by a cross
    at the top.

    Each line's gid says what it is, for :func:`speech_mt.plotting.report.make_report` to show on hovering.
    """
    styles = _styles(len(runs))
    blocks = _blocks({name for run in runs for name in run.quantities})
    rows = [
        Row(columns, run, style["color"])
        for columns in blocks
        for run, style in zip(runs, styles, strict=True)
        if any(f"{quantity.name}/{kind}" in run.quantities for quantity, kind in columns)
    ]
    updates = max(1, *(run.last_update for run in runs))
    top = (TITLE if title else 0) + LEGEND * ceil((len(runs) + 1) / LEGEND_COLUMNS)
    height = top + SCALARS + LAYERS * len(rows)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        if title:
            figure.text(0.1 / WIDTH, 1 - 0.27 / height, title, weight="bold", size=13)
        _draw_scalars(figure, 1 - top / height, runs, styles, updates)
        if rows:
            _draw_layers(figure, rows, updates)
    return figure


def _blocks(logged: set[str]) -> list[list[tuple[Quantity, str]]]:
    """The panels that some run has, in rows of at most COLUMNS; a quantity is never split."""
    blocks: list[list[tuple[Quantity, str]]] = []
    for quantity in QUANTITIES:
        columns = [(quantity, kind) for kind in KINDS if f"{quantity.name}/{kind}" in logged]
        if blocks and len(blocks[-1]) + len(columns) <= COLUMNS:
            blocks[-1] += columns
        elif columns:
            blocks.append(columns)
    return blocks


def _styles(count: int) -> list[dict[str, str]]:
    """A colour a run, and another line style once the colours are used up."""
    colours, dashes = len(RUN_COLOURS), ("-", "--", ":", "-.")
    return [{"color": RUN_COLOURS[k % colours], "linestyle": dashes[k // colours % len(dashes)]} for k in range(count)]


def _add_panel(figure: Figure, cell: SubplotSpec, updates: int, **labels: str) -> Axes:
    panel = figure.add_subplot(cell, xlim=(0, 1.01 * updates), **labels)
    panel.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    return panel


def _draw_scalars(
    figure: Figure, top: float, runs: Sequence[Run], styles: Sequence[dict[str, str]], updates: int
) -> None:
    """Loss of all runs, and gradient norm if any run has it."""
    columns = 1 + any(run.scalar("gnorm").steps.size for run in runs)
    bottom = top - SCALARS_PANEL / figure.get_figheight()
    grid = figure.add_gridspec(
        1, columns, left=LEFT / WIDTH, right=1 - 0.1 / WIDTH, top=top, bottom=bottom, wspace=0.16,
        width_ratios=[2, 1][:columns],
    )  # fmt: skip
    panel = _add_panel(figure, grid[0], updates, xlabel="update", ylabel="training loss (bits)")
    for run, style in zip(runs, styles, strict=True):
        _draw_line(panel, run.scalar("loss"), f"{run.label}: loss", linewidth=2.6, label=run.label, **style)
    for run, style in zip(runs, styles, strict=True):
        for split in run.valid_splits:
            steps, values = run.scalar("loss", split)
            points = panel.plot(steps, values, "o", color=style["color"], **VALIDATION)[0]
            points.set_gid(f"{run.label}: loss on {split} {_first_to_last(values)}")
    if any(run.valid_splits for run in runs):
        panel.plot([], [], "o", color=INK, label="validation", **VALIDATION)
    for run, style in zip(runs, styles, strict=True):
        _mark_collapse(panel, run, style["color"])
    above = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.0, "borderpad": 0.3}
    panel.legend(ncols=LEGEND_COLUMNS, prop={"weight": "bold"}, **above)
    _log_if_wide(panel)
    if columns == 2:
        panel = _add_panel(figure, grid[1], updates, xlabel="update", ylabel="gradient norm")
        for run, style in zip(runs, styles, strict=True):
            _draw_line(panel, run.scalar("gnorm"), f"{run.label}: gradient norm", linewidth=1.4, **style)
        _log_if_wide(panel)


def _mark_collapse(panel: Axes, run: Run, colour: str) -> None:
    """Where the first warning of a collapse came."""
    if run.warnings:
        update, failure, text = run.warnings[0]
        mark = panel.axvline(update, color=colour, linestyle=":", linewidth=1.6, zorder=1)
        mark.set_gid(f"{run.label}: {text}")
        place = panel.get_xaxis_transform()
        panel.text(update, 0.97, f" {failure} seen at {update}", transform=place, color=colour, va="top", size=9)


def _draw_layers(figure: Figure, rows: Sequence[Row], updates: int) -> None:
    """The runs' rows, from the bottom of the figure up, and the colour bar that all share."""
    height = figure.get_figheight()
    bottom, top = 0.5 / height, (0.5 + LAYERS_PANEL + LAYERS * (len(rows) - 1)) / height
    grid = figure.add_gridspec(
        len(rows), max(len(row.columns) for row in rows), left=LEFT / WIDTH, right=1 - RIGHT / WIDTH,
        bottom=bottom, top=top, wspace=0.24, hspace=LAYERS / LAYERS_PANEL - 1,
    )  # fmt: skip
    numbers = (n for row in rows for q, kind in row.columns for n in row.run.layer_series(f"{q.name}/{kind}"))
    depth = Normalize(0, max([1, *numbers]))
    panels: dict[Quantity, list[Axes]] = defaultdict(list)
    for number, row in enumerate(rows):
        xlabel = "update" if number == len(rows) - 1 else ""
        drawn = set()
        for index, (quantity, kind) in enumerate(row.columns):
            panel = _add_panel(figure, grid[number, index], updates, title=kind, xlabel=xlabel)
            if index == 0:
                _write_above(panel, 39, _outcome(row.run), color=row.colour, weight="bold", size=12.5)
            if quantity not in drawn:
                _write_above(panel, 22, quantity.heading, weight="bold", size=9.5)
            panel.tick_params(labelleft=quantity not in drawn)
            drawn.add(quantity)
            _draw_quantity(panel, row.run, f"{quantity.name}/{kind}", depth)
            panels[quantity].append(panel)
    for quantity, group in panels.items():
        _share_limits(group, quantity)

    first_block = sum(row.columns is rows[0].columns for row in rows)
    cell = grid[:first_block, 0].get_position(figure)
    bar_axes = figure.add_axes((1 - 0.6 / WIDTH, cell.y0, 0.13 / WIDTH, cell.height))
    bar = figure.colorbar(ScalarMappable(depth, DEPTH_COLOURS), cax=bar_axes, label="layer (0 = input side)")
    bar.outline.set_visible(False)
    bar_axes.grid(False)
    bar_axes.yaxis.set_major_locator(MaxNLocator(9, integer=True))


def _draw_quantity(panel: Axes, run: Run, name: str, depth: Normalize) -> None:
    """A line a layer, the deepest on top."""
    layers = run.layer_series(name)
    for layer, series in layers.items():
        gid = f"{run.label}: {name}, layer {layer}"
        _draw_line(panel, series, gid, color=DEPTH_COLOURS(depth(layer)), linewidth=1.4)
    if not layers:
        panel.text(0.5, 0.5, "not logged", transform=panel.transAxes, ha="center", color=FAINT)


def _write_above(panel: Axes, points: float, text: str, **style: object) -> None:
    panel.annotate(text, (0, 1), (0, points), "axes fraction", "offset points", **style)


def _share_limits(panels: Sequence[Axes], quantity: Quantity) -> None:
    """One y axis for all panels of a quantity, over what they hold and at least the quantity's limits."""
    held = [panel.dataLim.intervaly for panel in panels if np.isfinite(panel.dataLim.intervaly).all()]
    if quantity.limits:
        held.append(quantity.limits)
    if held:
        low, high = np.min(held), np.max(held)
        if high > WIDE:
            for panel in panels:
                panel.set_yscale("symlog", linthresh=WIDE / 100)
                panel.set_ylim(min(0, 2 * low), 2 * high)
                panel.yaxis.get_major_locator().set_params(numticks=6)
                panel.yaxis.set_major_formatter("{x:g}")
            return
        margin = 0.05 * (high - low or 1)
        for panel in panels:
            panel.set_ylim(low - margin, high + margin)
            panel.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


def _draw_line(panel: Axes, series: Series, gid: str, **style: object) -> None:
    """A line with gaps where a value is not finite, each marked by a cross at the top."""
    steps, values = series
    finite = np.isfinite(values)
    marker = "o" if finite.sum() == 1 else None
    line = panel.plot(steps, np.where(finite, values, np.nan), marker=marker, solid_capstyle="round", **style)[0]
    line.set_gid(f"{gid} {_first_to_last(values)}")
    if not finite.all():
        top = panel.get_xaxis_transform()
        at = steps[~finite]
        crosses = panel.plot(at, np.ones(at.size), "x", color=style["color"], transform=top, clip_on=False)[0]
        crosses.set_gid(f"{gid} not finite at {at.size} of {steps.size} points, first at update {at[0]}")


def _log_if_wide(panel: Axes) -> None:
    """A logarithmic axis where a linear one would press the end of training flat."""
    low, high = panel.dataLim.intervaly
    if 0 < low < high / 30 < np.inf:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 1000 * low else (1,)))
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("")


def _first_to_last(values: np.ndarray) -> str:
    return f"{values[0]:.4g} → {values[-1]:.4g}" if values.size else ""


def _outcome(run: Run) -> str:
    steps, values = run.scalar("loss")
    return f"{run.label}: loss {values[-1]:#.3g} after {steps[-1]} updates" if steps.size else run.label
