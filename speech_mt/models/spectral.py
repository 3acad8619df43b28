"""What the three models share: weights under control while training, plain weights for decoding."""

from __future__ import annotations

import logging
from argparse import Namespace

from torch import nn

from speech_mt.models.config import EncoderConfig
from speech_mt.reparam import fold, sigma_reparam

logger = logging.getLogger(__name__)

LAYERS = r"(^|\.)layers\.\d+\."  # every Linear in the layers; embeddings, front end and output stay as they are


def reparametrize(model: nn.Module, cfg: EncoderConfig) -> None:
    """Apply ``--reparam`` to a new model and log which weights it took."""
    if str(cfg.reparam) == "none":
        return
    names = sigma_reparam(model, include=LAYERS, gamma_init=str(cfg.reparam_gamma_init))
    logger.info(f"sigmaReparam on {len(names)} weights, gamma init {cfg.reparam_gamma_init}: {_summary(names)}")


def _summary(names: list[str]) -> str:
    """'encoder.layers.0-5: fc1, fc2, ...' from the full list."""
    stacks: dict[str, tuple[list[int], dict[str, None]]] = {}
    for name in names:
        stack, _, rest = name.partition(".layers.")
        index, _, weight = rest.partition(".")
        indices, weights = stacks.setdefault(stack, ([], {}))
        indices.append(int(index))
        weights[weight.removesuffix(".weight")] = None
    return "; ".join(
        f"{stack}.layers.{min(indices)}-{max(indices)}: {', '.join(weights)}"
        for stack, (indices, weights) in stacks.items()
    )


class FoldsForGeneration:
    """Mixin: fairseq-generate, -interactive and -validate decode with plain weights, at plain speed."""

    def make_generation_fast_(self, **kwargs: object) -> None:
        fold(self)
        super().make_generation_fast_(**kwargs)


def set_defaults(args: Namespace, **values: object) -> None:
    """In a named architecture: what the command line did not set."""
    for name, value in values.items():
        setattr(args, name, getattr(args, name, value))
