"""Runs as a single HTML file that opens offline: last numbers, the figure, and a heat map of every quantity."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Sequence
from html import escape
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from speech_mt.plotting.figures import QUANTITIES, RUN_COLOURS, make_figure
from speech_mt.plotting.heat_maps import make_heat_maps
from speech_mt.plotting.runs import Run

_SVG = "http://www.w3.org/2000/svg"
ElementTree.register_namespace("", _SVG)
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 1200px; margin: 2em auto;
       padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.1em; margin: 2em 0 .5em }
table { border-collapse: collapse } th, td { padding: .2em 1.2em .2em 0; text-align: left;
       border-bottom: 1px solid #e6e6e6; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto } svg g.named:hover path { stroke-width: 4 !important }
"""


def make_report(runs: Sequence[Run], title: str = "Training runs") -> str:
    """The page, as HTML: it refers to nothing outside itself. Lines of the figure say what they are on hovering."""
    quantities = _in_order({name for run in runs for name in run.quantities})
    parts = [
        f"<h1>{escape(title)}</h1>",
        _table(runs),
        _warnings(runs),
        "<h2>Training</h2>",
        _inline_svg(make_figure(runs)),
    ]
    for quantity in quantities:
        parts += [
            f"<h2>{escape(quantity)}: layer by update</h2>",
            _inline_svg(make_heat_maps(runs, quantity)),
        ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head>\n"
        "<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def last_numbers(run: Run) -> dict[str, str]:
    """What a run came to: name to the last value logged; of layers, their mean and range."""
    numbers = {"folder": str(run.folder), "updates": str(run.last_update)}
    for name, series in (
        ("training loss (bits)", run.scalar("loss")),
        ("gradient norm", run.scalar("gnorm")),
    ):
        if series.steps.size:
            numbers[name] = f"{series.values[-1]:.4g}"
    for split in run.valid_splits:
        values = run.scalar("loss", split).values
        if values.size:
            best = np.fmin.reduce(values)
            numbers[f"{split} loss (bits)"] = f"{values[-1]:.4g} (best {best:.4g})"
    for quantity in _in_order(run.quantities):
        last = [series.values[-1] for series in run.layer_series(quantity).values()]
        if all(map(math.isfinite, last)):
            numbers[quantity] = f"{np.mean(last):.4g} ({min(last):.4g} to {max(last):.4g})"
        else:
            numbers[quantity] = "not finite"
    return numbers


def _in_order(names: Iterable[str]) -> list[str]:
    """The figure's quantities first, in its order."""
    order = [quantity.name for quantity in QUANTITIES]

    def rank(name: str) -> tuple[int, str]:
        quantity = name.split("/")[0]
        return (order.index(quantity) if quantity in order else len(order), name)

    return sorted(names, key=rank)


def _table(runs: Sequence[Run]) -> str:
    """Last numbers: a row a number, a column a run."""
    columns = [last_numbers(run) for run in runs]
    names = list(dict.fromkeys(name for column in columns for name in column))
    colours = [RUN_COLOURS[k % len(RUN_COLOURS)] for k in range(len(runs))]
    head = "".join(
        f'<th style="color: {colour}">{escape(run.label)}</th>' for run, colour in zip(runs, colours, strict=True)
    )
    rows = (
        f"<tr><th>{escape(name)}</th>"
        + "".join(f"<td>{escape(column.get(name, ''))}</td>" for column in columns)
        + "</tr>"
        for name in names
    )
    caption = "<p>Last values logged; of quantities per layer the mean over layers, and their range.</p>"
    return f"{caption}<table><tr><th></th>{head}</tr>\n" + "\n".join(rows) + "</table>"


def _warnings(runs: Sequence[Run]) -> str:
    """What the collapse detector said, if anything."""
    items = [
        f"<li>{f'<b>{escape(run.label)}</b>: ' if len(runs) > 1 else ''}{escape(warned.text)}</li>"
        for run in runs
        for warned in run.warnings
    ]
    return "<h2>Warnings of collapse</h2><ul>" + "\n".join(items) + "</ul>" if items else ""


def _inline_svg(figure: Figure) -> str:
    """The figure as an SVG element; an artist's gid becomes its title, which browsers show on hovering."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(
            file,
            format="svg",
            dpi=150,
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    root = ElementTree.fromstring(file.getvalue())
    for key in ("width", "height"):
        del root.attrib[key]
    for group in root.iter(f"{{{_SVG}}}g"):
        name = group.attrib.pop("id", "")
        if ": " in name:
            group.set("class", "named")
            title = ElementTree.Element(f"{{{_SVG}}}title")
            title.text = name
            group.insert(0, title)
    return ElementTree.tostring(root, encoding="unicode")
