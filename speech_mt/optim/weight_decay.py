"""Parameters without weight decay, for any of fairseq's optimizers.

fairseq's optimizers decay all they are given; only ``composite`` reads a parameter's ``optim_overrides``. Here a
parameter says so in that way, and :func:`install` makes the plain optimizers listen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from speech_mt.errors import InputError
from speech_mt.modules.token_mixing import AttnScale, FeatScale
from speech_mt.reparam import ValueSpectrum

GROUP = "undecayed"  # the name of the group under ``optimizer: composite``


def exclude_from_weight_decay(parameter: nn.Parameter) -> None:
    """Mark a parameter."""
    parameter.param_group = GROUP
    parameter.optim_overrides = {"optimizer": {"weight_decay_scale": 0}}


def exclude_controls(model: nn.Module) -> None:
    """Mark Theta and psi of every value spectrum, and the scales of token mixing."""
    for module in model.modules():
        if isinstance(module, ValueSpectrum | AttnScale | FeatScale):
            for parameter in module.parameters():
                exclude_from_weight_decay(parameter)


def is_excluded(parameter: object) -> bool:
    """Whether a parameter, or fairseq's float32 copy of it, is marked."""
    return getattr(parameter, "param_group", None) == GROUP


def split_groups(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter] | list[dict[str, Any]]:
    """As they are if none is marked, else as two groups, so that torch's optimizers do not decay the second."""
    parameters = [p for p in parameters if p.requires_grad]
    excluded = [p for p in parameters if is_excluded(p)]
    if not excluded:
        return parameters
    decayed = [p for p in parameters if not is_excluded(p)]
    return [{"params": decayed}, {"params": excluded, "weight_decay": 0.0}]


def install() -> None:
    """Once. ``--fp16`` joins all parameters in one unless told not to, and is refused then."""
    from fairseq import optim

    if getattr(optim.build_optimizer, "knows_groups", False):
        return
    stock, half = optim.build_optimizer, optim.FP16Optimizer.build_optimizer.__func__

    def build_optimizer(cfg: Any, params: Sequence, *args: Any, **kwargs: Any) -> optim.FairseqOptimizer:
        if getattr(cfg, "_name", None) == "composite" or any(isinstance(p, dict) for p in params):
            return stock(cfg, params, *args, **kwargs)
        return optim._build_optimizer(cfg, split_groups(params), *args, **kwargs)

    def build_half_optimizer(cls: type, cfg: Any, params: Sequence, **kwargs: Any) -> optim.FairseqOptimizer:
        decay = getattr(cfg.optimizer, "weight_decay", 0.0)
        joined = not (getattr(cfg.common, "fp16_no_flatten_grads", False) or getattr(cfg.common, "bf16", False))
        if decay and joined and any(map(is_excluded, params)):
            raise InputError(
                f"--weight-decay {decay} with --fp16 would decay Theta and psi of --value-spectrum and the "
                "scales of --token-mixing too: add --fp16-no-flatten-grads"
            )
        return half(cls, cfg, params, **kwargs)

    build_optimizer.knows_groups = True
    optim.build_optimizer = build_optimizer
    optim.FP16Optimizer.build_optimizer = classmethod(build_half_optimizer)
