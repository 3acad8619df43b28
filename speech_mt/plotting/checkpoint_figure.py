"""Every layer of one checkpoint: a column a kind of attention, a row a quantity, layers from left to right."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from speech_mt.diagnostics.inspection import LayerNumbers
from speech_mt.diagnostics.sites import KINDS
from speech_mt.diagnostics.worries import Worry
from speech_mt.plotting.figures import RUN_COLOURS, STYLE, WIDTH

TITLE, PANEL = 0.6, 1.45  # inches of height
WORRY = "#FBE9E0"
HEAD, MEDIAN = "#56B4E9", "#0072B2"


class Row(NamedTuple):
    """A row of panels: ``values`` of a layer are lines by name, or dots, one a head."""

    heading: str
    values: Callable[[LayerNumbers], dict[str, float] | list[float]]
    limits: tuple[float, float] | None = None
    logarithmic: bool = False


def _heads(quantity: str) -> Callable[[LayerNumbers], list[float]]:
    return lambda row: row.per_head.get(quantity, [])


def _numbers(**names: str) -> Callable[[LayerNumbers], dict[str, float]]:
    return lambda row: {label: row.numbers[name] for name, label in names.items() if name in row.numbers}


ROWS = (
    Row("Spectral norm of each weight", lambda row: row.spectral_norms),
    Row("Gamma of each weight", lambda row: row.gammas),
    Row("Norm of W_Q W_K^T; a dot a head, the line their median", _heads("query_key_norm")),
    Row("Effective rank of W_Q W_K^T", _heads("effective_rank")),
    Row("Share of its energy in the top singular values", _heads("energy_concentration"), (0, 1)),
    Row("Real parts of the eigenvalues of H = W_V W_O", _numbers(highest_real="highest", lowest_real="lowest")),
    Row("H: share of positive ones, asymmetry", _numbers(positive_share="positive", asymmetry="asymmetry"), (0, 1)),
    Row("Condition number of H", _numbers(condition_number="condition number"), logarithmic=True),
    Row("On data: attention entropy / log(keys)", _heads("entropy_normalised"), (0, 1)),
    Row("On data: largest logit", _heads("max_logit")),
    Row(
        "On data: tokens (1, 0, 0: all alike)",
        _numbers(cosine="cosine", hfc_lfc="high / low frequency", rank_residual="residual of rank 1"),
        (0, 1),
    ),
)


def make_checkpoint_figure(rows: Sequence[LayerNumbers], worries: Iterable[Worry] = (), title: str = "") -> Figure:
    """Draw all that is known of the layers; those to worry about have a coloured ground. What is unknown is left out.

    Args:
        rows: of :func:`speech_mt.diagnostics.inspection.inspect_weights`.
        worries: of :func:`speech_mt.diagnostics.worries.find_worries`.
        title: above the figure.
    """
    kinds = [kind for kind in KINDS if any(row.kind == kind for row in rows)]
    drawn = [each for each in ROWS if any(each.values(row) for row in rows)]
    worried = {(worry.kind, layer) for worry in worries for layer in worry.layers}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, TITLE + PANEL * len(drawn)), layout="constrained")
        figure.suptitle(title, weight="bold", size=12, x=0.01, ha="left")
        figure.supxlabel("layer", size=9)
        panels = figure.subplots(len(drawn), len(kinds), sharex="col", sharey="row", squeeze=False)
        for each, of_row in zip(drawn, panels, strict=True):
            used = []
            for kind, panel in zip(kinds, of_row, strict=True):
                of_kind = [row for row in rows if row.kind == kind]
                if not any(each.values(row) for row in of_kind):
                    panel.set_axis_off()
                    continue
                used.append(panel)
                for row in of_kind:
                    if (kind, row.layer) in worried:
                        panel.axvspan(row.layer - 0.5, row.layer + 0.5, color=WORRY, linewidth=0, zorder=0)
                _draw(panel, of_kind, each)
                panel.set_title(f"{each.heading}\n{kind}" if used == [panel] else kind, size=9)
                panel.xaxis.set_major_locator(MaxNLocator(8, integer=True))
                panel.tick_params(labelbottom=True, labelsize=8)
            lines, names = used[0].get_legend_handles_labels()
            if len(names) > 1:  # above the last panel, where there is most room
                tight = {"handlelength": 1.2, "columnspacing": 1.0}
                used[-1].legend(lines, names, ncols=3, fontsize=7, loc="lower right", bbox_to_anchor=(1, 1), **tight)
    return figure


def _draw(panel: Axes, rows: Sequence[LayerNumbers], each: Row) -> None:
    layers = np.array([row.layer for row in rows])
    values = [each.values(row) for row in rows]
    if any(isinstance(value, list) for value in values):
        known = [(layer, heads) for layer, heads in zip(layers, values, strict=True) if heads]
        for layer, heads in known:
            panel.plot([layer] * len(heads), heads, "o", color=HEAD, markersize=2.5, alpha=0.7)
        panel.plot([layer for layer, _ in known], [np.median(heads) for _, heads in known], color=MEDIAN)
    else:
        names = list(dict.fromkeys(name for value in values for name in value))
        for k, name in enumerate(names):
            line = [value.get(name, np.nan) for value in values]
            colour, dash = RUN_COLOURS[k % len(RUN_COLOURS)], ("-", "--")[k // len(RUN_COLOURS) % 2]
            panel.plot(layers, line, dash, marker=".", color=colour, linewidth=1.3, label=name)
    if each.logarithmic:
        panel.set_yscale("log")
    if each.limits:
        low, high = panel.dataLim.intervaly
        panel.set_ylim(min(low, each.limits[0]) - 0.03, max(high, each.limits[1]) + 0.03)
