"""TensorBoard beyond fairseq's scalars: charts of all layers, heat maps of heads, histograms of gamma, warnings.

fairseq writes ``entropy/encoder/03`` and the like at each log interval, from its first process alone. What is here goes
through the same writers at the same time, so that a folder has one file a process. A resumed run hides what an
interrupted one wrote after its last checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.logging import metrics, progress_bar
from torch.utils.tensorboard import SummaryWriter

from speech_mt.diagnostics.collapse import Collapse
from speech_mt.diagnostics.monitor import Measured
from speech_mt.diagnostics.sites import KINDS

SPLIT = "train_inner"  # fairseq's name for what it logs at each interval
CELL = 16  # pixels
CHARTS = {  # quantity of --monitor -> names of its scalars and their titles
    "entropy": {
        "entropy_normalised": "Attention entropy / log(visible keys); 1: uniform attention",
        "entropy": "Attention entropy, nats",
    },
    "logits": {"max_logit": "Largest attention logit"},
    "gamma": {"gamma": "Gamma, largest of the layer"},
    "spectra": {
        "spectral_norm": "Spectral norm of the weights, largest of the layer",
        "query_key_norm": "Spectral norm of W_Q W_K^T, largest head",
        "effective_rank": "Effective rank of W_Q W_K^T, lowest head",
        "energy_concentration": "Energy in the top singular values of W_Q W_K^T, highest head",
    },
    "smoothing": {
        "cosine": "Cosine between tokens; 1: all alike",
        "hfc_lfc": "High to low frequency; 0: all tokens alike",
        "rank_residual": "Residual of rank 1; 0: all tokens alike",
    },
}


class Board:
    """What waits to be written at the next log interval.

    Args:
        quantities: what the monitor measures.
    """

    def __init__(self, quantities: Iterable[str]) -> None:
        self.quantities = frozenset(quantities)
        self._latest: tuple[int, Measured] | None = None
        self._warnings: list[Collapse] = []
        self._has_layout = False

    def note(self, update: int, measured: Measured) -> None:
        """Keep the latest measurement."""
        self._latest = update, measured

    def warn(self, collapse: Collapse) -> None:
        self._warnings.append(collapse)

    def write(self, writer: SummaryWriter) -> None:
        """Write what waits."""
        for collapse in self._warnings:
            writer.add_text("collapse", f"**{collapse.failure}**, {collapse}", collapse.update)
        self._warnings = []
        if self._latest is not None:
            (update, measured), self._latest = self._latest, None
            if not self._has_layout:
                writer.add_custom_scalars(layout(self.quantities, measured))
                self._has_layout = True
            for kind in KINDS:
                name = f"entropy_normalised/{kind}"
                if name in measured.heads:
                    image = heat_map(measured.heads[name].numpy())
                    writer.add_image(f"layer_by_head/{name}", image, update, dataformats="HWC")
            for kind, weights in measured.gammas.items():
                for weight, layers in weights.items():
                    for layer, value in layers.items():
                        writer.add_scalar(f"gamma/{kind}/{weight}/{layer:02d}", value, update)
                values = [value for layers in weights.values() for value in layers.values()]
                writer.add_histogram(f"gamma/{kind}", np.array(values), update)
        writer.flush()


def layout(quantities: Iterable[str], measured: Measured) -> dict[str, dict[str, list]]:
    """TensorBoard's custom scalars: a category a quantity, a chart a kind of attention with a line a layer."""
    kinds = [kind for kind in KINDS if any(name.endswith(f"/{kind}") for name in measured.layers)]
    charts: dict[str, dict[str, list]] = {}
    for quantity, names in CHARTS.items():
        if quantity in quantities:
            of_layers = quantity == "smoothing"
            for name, title in names.items():
                charts[title] = {
                    kind: ["Multiline", [rf"{name}/{kind}/\d+$"]]
                    for kind in kinds
                    if not (of_layers and kind == "cross")
                }
    if measured.gammas:
        charts["Gamma of each weight"] = {
            f"{kind} {weight}": ["Multiline", [rf"gamma/{kind}/{weight}/\d+$"]]
            for kind, weights in measured.gammas.items()
            for weight in weights
        }
    return charts


def heat_map(values: np.ndarray) -> np.ndarray:
    """(L, H) from 0 to 1 as a picture, uint8 (CELL L, CELL H, 3): layers down, heads to the right; grey: unknown."""
    import matplotlib

    colours = matplotlib.colormaps["cividis"].with_extremes(bad="#cccccc")
    pixels = colours(np.ma.masked_invalid(values.clip(0, 1)), bytes=True)[..., :3]
    return pixels.repeat(CELL, 0).repeat(CELL, 1)


def install(board: Board) -> None:
    """Let fairseq's TensorBoard wrapper write the board with its own, and hide what a resumed run repeats."""
    wrapper = progress_bar.TensorboardProgressBarWrapper
    wrapper.board = board
    stock = wrapper._log_to_tensorboard
    if hasattr(stock, "writes_board"):
        return

    def _log_to_tensorboard(self: Any, stats: dict, tag: str | None = None, step: int | None = None) -> None:  # noqa: ANN401
        writers = progress_bar._tensorboard_writers
        if tag and tag not in writers:
            start = stats["num_updates"] if step is None else step
            writers[tag] = SummaryWriter(Path(self.tensorboard_logdir, tag), purge_step=start)
            writers[tag].add_text("sys.argv", " ".join(sys.argv))
        stock(self, stats, tag, step)
        if tag == SPLIT:
            wrapper.board.write(writers[tag])

    _log_to_tensorboard.writes_board = True
    wrapper._log_to_tensorboard = _log_to_tensorboard


def log_now(logdir: str, update: int) -> None:
    """Log what came since the last log interval, before an end; in the process that writes TensorBoard files."""
    stats = metrics.get_smoothed_values(SPLIT)
    if stats.get("loss") is None:  # nothing came; what is there are old times
        stats = {}
    progress_bar.TensorboardProgressBarWrapper(None, logdir)._log_to_tensorboard(stats, SPLIT, update)
