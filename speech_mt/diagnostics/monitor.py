"""What is measured when: the one place that watches a model's forward passes and turns them into logged numbers.

The monitor sees real training batches, adds nothing to the graph and changes no result. Its statistics are sums, so
that they add up over micro-batches, ranks and batches of any size:

    monitor = Monitor(("entropy", "smoothing"), interval=10)
    with monitor.watch(model, target_padding_mask):
        model(...)
    logging_output.update(monitor.statistics())          # summable tensors
    ...
    log_statistics(logging_outputs)                      # entropy/encoder/03, cosine/decoder/05, ...

It watches speech_mt's attention through its ``observer``, and fairseq's own through a hook that projects the queries
and keys once more, so a stock model can be watched unchanged.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from speech_mt.diagnostics.attention_entropy import attention_entropy, entropy_statistics, visible_keys
from speech_mt.diagnostics.oversmoothing import token_cosine
from speech_mt.modules.attention import MultiheadAttention
from speech_mt.modules.layers import DecoderLayer, EncoderLayer

QUANTITIES = ("entropy", "smoothing")
KINDS = ("encoder", "decoder", "cross")
_PREFIX = "monitor_"
_ATTENTION = re.compile(r"(encoder|decoder)\.(?:\w+\.)*(?!conv)\w*layers\.(\d+)\.(?:\w+\.)*(self_attn|encoder_attn)$")
_LAYER = re.compile(r"(encoder|decoder)\.(?:\w+\.)*(?!conv)\w*layers\.(\d+)$")


class Clock(nn.Module):
    """Knows the number of updates: fairseq tells it to every module of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.num_updates = 0

    def set_num_updates(self, num_updates: int) -> None:
        self.num_updates = num_updates


class Site(NamedTuple):
    """An attention or a layer of the model: its kind (encoder, decoder, cross), number and module."""

    kind: str
    layer: int
    module: nn.Module


def attention_sites(model: nn.Module) -> list[Site]:
    """Every attention of an encoder or decoder layer, found by name, in order."""
    sites = []
    for name, module in model.named_modules():
        if match := _ATTENTION.search(name):
            stack, layer, attention = match.groups()
            sites.append(Site("cross" if attention == "encoder_attn" else stack, int(layer), module))
    return sites


def layer_sites(model: nn.Module) -> list[Site]:
    """Every encoder and decoder layer, found by name, in order."""
    return [
        Site(match[1], int(match[2]), module)
        for name, module in model.named_modules()
        if (match := _LAYER.search(name))
    ]


class Monitor:
    """Watches a model; see the module's text.

    Args:
        quantities: of :data:`QUANTITIES`.
        interval: in training, measure on every interval-th update; in validation always.
    """

    def __init__(self, quantities: Sequence[str] = ("entropy",), interval: int = 1) -> None:
        unknown = set(quantities) - set(QUANTITIES)
        if unknown:
            raise ValueError(f"cannot monitor {', '.join(sorted(unknown))}; known are {', '.join(QUANTITIES)}")
        if interval < 1:
            raise ValueError(f"monitor interval is a number of updates, at least 1, not {interval}")
        self.quantities, self.interval = tuple(quantities), interval
        self._model: nn.Module | None = None
        self._sums: dict[str, list[Tensor]] = {}
        self._target_padding_mask: Tensor | None = None

    def _attach(self, model: nn.Module) -> None:
        """Find what to watch, once a model."""
        if self._model is model:
            return
        self._model = model
        self._attentions, self._layers = attention_sites(model), layer_sites(model)
        if not hasattr(model, "monitor_clock"):
            model.add_module("monitor_clock", Clock())
        self._clock = model.monitor_clock

    @contextmanager
    def watch(self, model: nn.Module, target_padding_mask: Tensor | None = None) -> Iterator[None]:
        """Measure the forward passes run inside, if it is time to.

        Args:
            model: the model, DistributedDataParallel-wrapped or not.
            target_padding_mask: (B, T), True where the decoder's input is padding.
        """
        while hasattr(model, "module"):
            model = model.module
        self._attach(model)
        self._sums = {}
        if model.training and self._clock.num_updates % self.interval:
            yield
            return
        self._target_padding_mask = target_padding_mask
        handles = []
        if "entropy" in self.quantities:
            for site in self._attentions:
                if isinstance(site.module, MultiheadAttention):
                    site.module.observer = self._observer(site)
                else:
                    handles.append(site.module.register_forward_pre_hook(self._stock_hook(site), with_kwargs=True))
        if "smoothing" in self.quantities:
            handles += [
                site.module.register_forward_hook(self._layer_hook(site), with_kwargs=True) for site in self._layers
            ]
        try:
            yield
        finally:
            for site in self._attentions:
                if isinstance(site.module, MultiheadAttention):
                    site.module.observer = None
            for handle in handles:
                handle.remove()
            self._target_padding_mask = None

    # -- measuring ------------------------------------------------------------------------------------------

    def _observer(self, site: Site):  # noqa: ANN202
        def observe(
            module: MultiheadAttention, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, causal: bool
        ) -> None:
            self._add_entropy(site, q, k, key_padding_mask, causal, module.scale)

        return observe

    def _stock_hook(self, site: Site):  # noqa: ANN202
        @torch.no_grad()
        def measure(module: nn.Module, args: tuple, kwargs: dict) -> None:
            query = args[0] if args else kwargs["query"]
            key = args[1] if len(args) > 1 else kwargs["key"]
            key = query if key is None else key

            def heads(projection: nn.Linear, x_TBC: Tensor) -> Tensor:
                projected = torch.nn.functional.linear(x_TBC, projection.weight, projection.bias)
                return projected.unflatten(-1, (module.num_heads, -1)).permute(1, 2, 0, 3)

            causal = kwargs.get("attn_mask") is not None and site.kind == "decoder"
            self._add_entropy(
                site,
                heads(module.q_proj, query),
                heads(module.k_proj, key),
                kwargs.get("key_padding_mask"),
                causal,
                module.head_dim**-0.5,
            )

        return measure

    def _add_entropy(
        self, site: Site, q: Tensor, k: Tensor, key_padding_mask: Tensor | None, causal: bool, scale: float
    ) -> None:
        if key_padding_mask is not None:
            key_padding_mask = key_padding_mask.bool()
        entropy = attention_entropy(q, k, key_padding_mask, causal, scale)
        visible = visible_keys(q.shape[2], k.shape[2], key_padding_mask, causal, q.device)
        queries = key_padding_mask if site.kind == "encoder" else self._target_padding_mask
        statistics = entropy_statistics(entropy, visible, queries)
        self._add(f"entropy_{site.kind}", torch.stack(statistics[:6]))  # (6, H); the minimum does not add up

    def _layer_hook(self, site: Site):  # noqa: ANN202
        @torch.no_grad()
        def measure(module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            x = output[0] if isinstance(output, tuple) else output
            if isinstance(module, EncoderLayer | DecoderLayer):
                mask = args[1] if site.kind == "encoder" and len(args) > 1 else None
            else:
                x = x.transpose(0, 1)
                mask = kwargs.get("encoder_padding_mask", args[1] if len(args) > 1 else None)
            mask = mask if site.kind == "encoder" else self._target_padding_mask
            cosine = token_cosine(x, mask)
            defined = cosine.isfinite()  # a sentence of one token has none
            self._add(f"cosine_{site.kind}", torch.stack([cosine.where(defined, 0.0).sum(), defined.sum()]))

        return measure

    def _add(self, key: str, values: Tensor) -> None:
        self._sums.setdefault(key, []).append(values)

    # -- logging --------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, Tensor]:
        """What the last watched forward pass measured: tensors (layers, ...) that may be summed; {} if not its time."""
        return {_PREFIX + key: torch.stack(values) for key, values in self._sums.items()}


def log_statistics(logging_outputs: Sequence[dict]) -> None:
    """Log summed statistics through fairseq's metrics, a number a layer: in the training log and in TensorBoard.

    ``entropy/<kind>/<layer>`` is the mean over heads and queries in nats, ``entropy_normalised/...`` that of entropy
    over log(visible keys), ``cosine/<stack>/<layer>`` the mean cosine of different tokens, averaged over sentences.
    """
    from fairseq.logging import metrics

    def log(name: str, numerator: Tensor, denominator: Tensor) -> None:
        for layer, (value, weight) in enumerate(zip(numerator.tolist(), denominator.tolist(), strict=True)):
            if weight > 0:  # nothing measured is not 0
                metrics.log_scalar(f"{name}/{layer:02d}", value / weight, weight, round=6)

    for kind in KINDS:
        sums = _sum(logging_outputs, f"entropy_{kind}")
        if sums is not None:  # (L, 6, H)
            total, rows, normalised, normalised_rows, _, nonfinite = sums.sum(-1).unbind(1)
            log(f"entropy/{kind}", total, rows)
            log(f"entropy_normalised/{kind}", normalised, normalised_rows)
            if nonfinite.any():
                metrics.log_scalar(f"entropy_nonfinite/{kind}", nonfinite.sum().item())
        sums = _sum(logging_outputs, f"cosine_{kind}")
        if sums is not None:  # (L, 2)
            log(f"cosine/{kind}", *sums.unbind(1))


def _sum(logging_outputs: Sequence[dict], key: str) -> Tensor | None:
    tensors = [log[_PREFIX + key].double() for log in logging_outputs if _PREFIX + key in log]
    return torch.stack(tensors).sum(0) if tensors else None
