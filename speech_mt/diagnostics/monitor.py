"""What is measured when: the one place that watches a model's forward passes and turns them into numbers.

The monitor sees real training batches, adds nothing to the graph and changes no result:

    monitor = Monitor(("entropy", "logits"), interval=10)
    with monitor.watch(model, target_padding_mask):
        model(...)
    logging_output.update(monitor.statistics())     # sums: they add up over micro-batches, ranks, uneven batches
    ...
    measured = monitor.reduce(logging_outputs)      # once an update, on all ranks

A maximum does not add up: the largest logits stay in the monitor until :meth:`Monitor.reduce`, which takes the maximum
over ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
import torch.distributed
from torch import Tensor, nn

from speech_mt.diagnostics.attention_entropy import entropy_statistics, largest_per_head, visible_keys
from speech_mt.diagnostics.oversmoothing import high_to_low_frequency, rank_collapse_residual, token_cosine
from speech_mt.diagnostics.sites import (
    KINDS,
    Seen,
    Site,
    attention_sites,
    layer_sites,
    num_heads,
    stack_depths,
    watch_attention,
    watch_layer,
    weight_sites,
)
from speech_mt.diagnostics.weights import Layers, gammas, largest_gammas, spectra

QUANTITIES = ("entropy", "logits", "gamma", "spectra", "smoothing", "sharpness")
DEFAULT_QUANTITIES = ("entropy", "logits", "gamma")
SPECTRA_INTERVAL = 10  # spectra are measured on every tenth of the monitor's updates
SMOOTHING = {
    "cosine": token_cosine,
    "hfc_lfc": partial(high_to_low_frequency, length_normalised=True),
    "rank_residual": rank_collapse_residual,
}
logger = logging.getLogger(__name__)

_PREFIX = "monitor_"
_SUMS = ("entropy", "rows", "normalised", "normalised_rows", "unseen", "nonfinite")  # of EntropyStatistics


class Clock(nn.Module):
    """Knows the number of updates: fairseq tells it to every module of a model."""

    num_updates: int | None = None

    def set_num_updates(self, num_updates: int) -> None:
        self.num_updates = num_updates


@dataclass
class Measured:
    """What one update came to, over all micro-batches and ranks.

    Attributes:
        layers: ``entropy/encoder`` -> layer number -> value; layers that were not measured are missing.
        counts: of an entry of ``layers``, what its value is a mean over: layer number -> number.
        heads: ``entropy_normalised/encoder`` or ``max_logit/encoder`` -> (L, H), NaN where not measured.
        nonfinite: kind -> attention rows whose entropy is not finite, if there are any.
        gammas: kind -> weight's name -> layer number -> gamma.
    """

    layers: dict[str, Layers] = field(default_factory=dict)
    counts: dict[str, Layers] = field(default_factory=dict)
    heads: dict[str, Tensor] = field(default_factory=dict)
    nonfinite: dict[str, int] = field(default_factory=dict)
    gammas: dict[str, dict[str, Layers]] = field(default_factory=dict)

    def add_mean(self, name: str, sums: Tensor, counts: Tensor) -> None:
        """sums (L,) over counts (L,): nothing counted is not 0."""
        pairs = list(zip(sums.tolist(), counts.tolist(), strict=True))
        self.layers[name] = {i: value / count for i, (value, count) in enumerate(pairs) if count > 0}
        self.counts[name] = {i: count for i, (_, count) in enumerate(pairs) if count > 0}


class Monitor:
    """Watches a model; see the module's text.

    Args:
        quantities: of :data:`QUANTITIES`; sharpness needs a loss and is not the monitor's.
        interval: in training, measure the first update and every interval-th; in validation always.
    """

    def __init__(self, quantities: Sequence[str] = DEFAULT_QUANTITIES, interval: int = 1) -> None:
        unknown = set(quantities) - set(QUANTITIES)
        if unknown:
            raise ValueError(f"cannot monitor {', '.join(sorted(unknown))}; known are {', '.join(QUANTITIES)}")
        if interval < 1:
            raise ValueError(f"monitor interval is a number of updates, at least 1, not {interval}")
        self.quantities, self.interval = frozenset(quantities), interval
        self.in_training = True  # at the last forward pass watched
        self.wants_cosine = False  # set from outside, alike on all ranks: measure it without "smoothing"
        self._model: nn.Module | None = None
        self._sums: dict[str, Tensor] = {}
        self._largest: dict[str, Tensor] = {}
        self._last_largest: tuple[dict[str, Tensor], int] = {}, 0
        self._weights = Measured()
        self._weights_update: int | None = None
        self._target_padding_mask: Tensor | None = None

    # -- watching -------------------------------------------------------------------------------------------

    def attach(self, model: nn.Module) -> nn.Module:
        """Find what to watch, once a model; return the model itself, without DistributedDataParallel."""
        while hasattr(model, "module"):
            model = model.module
        if self._model is model:
            return model
        self._model = model
        self.attentions, self._layers, self._named_weights = (
            find(model) for find in (attention_sites, layer_sites, weight_sites)
        )
        self._depths = stack_depths([*self.attentions, *self._layers])
        if not self.attentions:
            logger.warning(
                f"{type(model).__name__}: found no attention to watch, looked for encoder.layers.N.self_attn"
            )
        self._heads = {site.kind: num_heads(site.module) for site in self.attentions}
        if not hasattr(model, "monitor_clock"):
            model.add_module("monitor_clock", Clock())
        self.clock = model.monitor_clock
        return model

    def is_due(self, every: int = 1) -> bool:
        """Whether this update is the first, or one that ``every * interval`` divides; counted from 1."""
        done = self.clock.num_updates or 0  # unknown in a process's first update
        return done == 0 or (done + 1) % (every * self.interval) == 0

    @contextmanager
    def watch(self, model: nn.Module, target_padding_mask: Tensor | None = None) -> Iterator[None]:
        """Measure the forward passes run inside, if it is time to.

        Args:
            model: the model, DistributedDataParallel-wrapped or not.
            target_padding_mask: (B, T), True where the decoder's input is padding.
        """
        model = self.attach(model)
        self._sums, self.in_training = {}, model.training
        if self.in_training:
            if not self.is_due():
                yield
                return
            self._measure_weights()
        self._target_padding_mask = target_padding_mask
        attentions = self.attentions if {"entropy", "logits"} & self.quantities else []
        smoothing = tuple(SMOOTHING) if "smoothing" in self.quantities else ("cosine",) * self.wants_cosine
        self._allocate(attentions, smoothing, next(model.parameters(), torch.empty(0)).device)
        removes = []
        try:
            removes += [watch_attention(site, partial(self._add_attention, site)) for site in attentions]
            if smoothing:
                removes += [watch_layer(site, partial(self._add_smoothing, smoothing, site)) for site in self._layers]
            yield
        finally:
            for remove in removes:
                remove()
            self._target_padding_mask = None

    def _measure_weights(self) -> None:
        """Gamma, and on a slower interval spectra: once an update, of the weights that its forward passes see."""
        if self._weights_update is not None and self._weights_update == self.clock.num_updates:
            return
        self._weights_update, self._weights = self.clock.num_updates, Measured()
        if "gamma" in self.quantities:
            self._weights.gammas = gammas(self._named_weights)
            self._weights.layers |= largest_gammas(self._weights.gammas)
        if "spectra" in self.quantities and self.is_due(SPECTRA_INTERVAL):
            self._weights.layers |= spectra(self._named_weights, self.attentions)

    def _allocate(self, attentions: Sequence[Site], smoothing: Sequence[str], device: torch.device) -> None:
        """Zeros for all that may be seen: ranks need the same keys, though one may drop every layer of a kind."""
        for kind in dict.fromkeys(site.kind for site in attentions):
            depth, heads = self._depths[kind], self._heads[kind]
            self._sums[f"attention_{kind}"] = torch.zeros(depth, len(_SUMS), heads, device=device)
            if "logits" in self.quantities and kind not in self._largest:  # else of an earlier micro-batch
                self._largest[kind] = torch.full((depth, heads), -torch.inf, device=device)
        for name, kind in product(smoothing, dict.fromkeys(site.kind for site in self._layers)):
            self._sums[f"{name}_{kind}"] = torch.zeros(self._depths[kind], 2, device=device)

    @torch.no_grad()
    def _add_attention(self, site: Site, seen: Seen) -> None:
        entropy, largest = seen.rows.entropy, seen.rows.max_logit
        visible = visible_keys(entropy.shape[2], seen.keys, seen.key_padding_mask, seen.causal, entropy.device)
        queries = seen.key_padding_mask if site.kind == "encoder" else self._target_padding_mask
        statistics = entropy_statistics(entropy, visible, queries)
        sums = self._sums[f"attention_{site.kind}"][site.layer]
        sums += torch.stack(statistics[: len(_SUMS)])  # the minimum does not add up
        if "logits" in self.quantities:
            row = self._largest[site.kind][site.layer]
            torch.maximum(row, largest_per_head(largest, visible, queries), out=row)

    @torch.no_grad()
    def _add_smoothing(self, names: Sequence[str], site: Site, x: Tensor, encoder_padding_mask: Tensor | None) -> None:
        mask = encoder_padding_mask if site.kind == "encoder" else self._target_padding_mask
        for name in names:
            values = SMOOTHING[name](x, mask)
            defined = values.isfinite()  # a sentence of one token has none
            sums = self._sums[f"{name}_{site.kind}"][site.layer]
            sums += torch.stack([values.where(defined, 0.0).sum(), defined.sum()])

    # -- numbers --------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop what the running update has shown so far: it will not be one."""
        self._sums, self._largest = {}, {}

    def largest_logit(self) -> str | None:
        """The largest attention logit of this update, or else of the last one measured, and where it was."""
        seen, update = (self._largest, self.clock.num_updates or 0) if self._largest else self._last_largest
        if not seen:
            return None
        kind = max(seen, key=lambda kind: seen[kind].nan_to_num(nan=torch.inf).max())
        layer, head = divmod(int(seen[kind].nan_to_num(nan=torch.inf).argmax()), seen[kind].shape[1])
        return f"{seen[kind][layer, head]:.4g} in {kind} layer {layer}, head {head} (update {update + 1})"

    def statistics(self) -> dict[str, Tensor]:
        """Sums over the last watched forward pass, tensors (layers, ...); {} if it was not its time."""
        return {_PREFIX + key: value for key, value in self._sums.items()}

    def reduce(self, logging_outputs: Sequence[dict]) -> Measured | None:
        """Everything measured since the last call; None if it was not its time.

        Args:
            logging_outputs: statistics of all micro-batches, those of other ranks added or among them. All ranks
                have to call this together.
        """
        measured, self._weights = self._weights, Measured()
        if self._largest:
            self._last_largest = dict(self._largest), self.clock.num_updates or 0
        for kind in KINDS:
            sums = _sum(logging_outputs, f"attention_{kind}")
            if sums is not None and sums.any():
                entropy, rows, normalised, normalised_rows, _, nonfinite = sums.unbind(1)  # each (L, H)
                measured.add_mean(f"entropy/{kind}", entropy.sum(1), rows.sum(1))
                measured.add_mean(f"entropy_normalised/{kind}", normalised.sum(1), normalised_rows.sum(1))
                measured.heads[f"entropy_normalised/{kind}"] = normalised / normalised_rows
                if nonfinite.any():
                    measured.nonfinite[kind] = int(nonfinite.sum())
                if "logits" in self.quantities:
                    measured.heads[f"max_logit/{kind}"] = self._largest.pop(kind, torch.full_like(rows, -torch.inf))
            for name in SMOOTHING:
                sums = _sum(logging_outputs, f"{name}_{kind}")
                if sums is not None and sums.any():
                    measured.add_mean(f"{name}/{kind}", *sums.unbind(1))
        _max_over_ranks(measured)
        return measured if measured.layers else None


def _sum(logging_outputs: Sequence[dict], key: str) -> Tensor | None:
    tensors = [log[_PREFIX + key].double() for log in logging_outputs if _PREFIX + key in log]
    return torch.stack(tensors).sum(0).cpu() if tensors else None


def _max_over_ranks(measured: Measured) -> None:
    """The largest logits of all ranks, by one small message; and of each layer, its largest head's."""
    names = [name for name in measured.heads if name.startswith("max_logit/")]
    if not names:
        return
    flat = torch.cat([measured.heads[name].cpu().float().flatten() for name in names])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        flat = flat.cuda() if torch.distributed.get_backend() == "nccl" else flat
        torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX)
    flat = flat.double().cpu()
    for name in names:
        shape = measured.heads[name].shape
        values, flat = flat[: shape.numel()].view(shape), flat[shape.numel() :]
        measured.heads[name] = values.masked_fill(values == -torch.inf, torch.nan)
        of_layers = values.amax(1).tolist()
        measured.layers[name] = {i: value for i, value in enumerate(of_layers) if value != -torch.inf}
