"""LARS: a step of every weight in proportion to its own norm (You et al. 2017, arXiv 1708.03888).

With w a parameter tensor, g its gradient, lambda the weight decay and eta the trust coefficient:

    ratio = eta ||w|| / (||g|| + lambda ||w||)
    m     = momentum m + lr ratio (g + lambda w)
    w     = w - m

A tensor that is 0, or whose gradient is, moves with ratio 1. Biases, LayerNorm and gamma are adapted like matrices, as
in optax, with which the speech recognisers after sigmaReparam are trained.
"""

# fairseq reads the types of options when it runs: no "from __future__ import annotations" here.

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import List  # noqa: UP035 (what fairseq can read)

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.optim import FairseqOptimizer, register_optimizer
from omegaconf import II
from torch import Tensor, nn


class LARS(torch.optim.Optimizer):
    """The optimizer in plain torch.

    Args:
        params: parameters or groups of them.
        lr: global learning rate; times ``trust_coefficient``, it is the relative change of a weight in a step.
        momentum: of the scaled steps.
        trust_coefficient: eta.
        weight_decay: lambda.

    Raises:
        ValueError: a number below 0.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "trust_coefficient": trust_coefficient,
            "weight_decay": weight_decay,
        }
        for name, value in defaults.items():
            if not value >= 0:  # nor is NaN
                raise ValueError(f"LARS: {name} is {value}, not 0 or more")
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if weights:
                self._step(weights, group)
        return loss

    def _step(self, weights: list[nn.Parameter], group: dict) -> None:
        gradients = [p.grad for p in weights]
        decay = group["weight_decay"]
        weight_norms = torch.stack(torch._foreach_norm(weights))
        gradient_norms = torch.stack(torch._foreach_norm(gradients))
        ratios = group["trust_coefficient"] * weight_norms / (gradient_norms + decay * weight_norms)
        ratios = torch.where((weight_norms > 0) & (gradient_norms > 0), ratios, torch.ones_like(ratios))
        if decay:
            gradients = torch._foreach_add(gradients, weights, alpha=decay)
        steps = torch._foreach_mul(gradients, (group["lr"] * ratios).unbind())
        if group["momentum"]:
            momenta = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in weights]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, steps)
            steps = momenta
        torch._foreach_sub_(weights, steps)


@dataclass
class LARSConfig(FairseqDataclass):
    """Options of ``--optimizer lars``."""

    momentum: float = field(default=0.9, metadata={"help": "momentum of the scaled steps"})
    trust_coefficient: float = field(default=0.001, metadata={"help": "step over norm of a weight, at lr 1"})
    weight_decay: float = field(default=0.0, metadata={"help": "weight decay"})
    lr: List[float] = II("optimization.lr")  # noqa: UP006


@register_optimizer("lars", dataclass=LARSConfig)
class FairseqLARS(FairseqOptimizer):
    """LARS under ``--optimizer lars``; with --fp16 it wants --fp16-no-flatten-grads, for it needs a norm a tensor."""

    def __init__(self, cfg: LARSConfig, params: Iterable) -> None:
        super().__init__(cfg)
        self._optimizer = LARS(params, **self.optimizer_config)

    @property
    def optimizer_config(self) -> dict:
        """What overrides the options in a checkpoint."""
        return {
            "lr": self.cfg.lr[0],
            "momentum": self.cfg.momentum,
            "trust_coefficient": self.cfg.trust_coefficient,
            "weight_decay": self.cfg.weight_decay,
        }

    @property
    def supports_flat_params(self) -> bool:
        return False
