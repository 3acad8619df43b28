"""What the three models share: weights under control while training, plain weights for decoding."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path

from torch import nn

from speech_mt.checkpoint import MismatchError, explain_mismatch, load_checkpoint
from speech_mt.errors import InputError
from speech_mt.models.config import EncoderConfig
from speech_mt.reparam import REPARAMS, fold, states

logger = logging.getLogger(__name__)

LAYERS = r"(^|\.)layers\.\d+\."  # every Linear in the layers; embeddings, front end and output stay as they are


def reparametrize(model: nn.Module, cfg: EncoderConfig) -> None:
    """Apply ``--reparam`` to a new model, log which weights it took, and refuse what cannot mean anything.

    gamma belongs to the optimizer's parameter group ``gamma``: it shares the learning rate and weight decay of all
    parameters, unless ``optimizer: composite`` gives that group its own.

    Raises:
        InputError: options that contradict each other.
    """
    for option in ("attention_softcap", "qk_clip"):
        if getattr(cfg, option) < 0:
            raise InputError(f"--{option.replace('_', '-')} {getattr(cfg, option)}: 0 is off, anything else above 0")
    if not 0 <= cfg.layerdrop < 1:
        raise InputError(f"--layerdrop {cfg.layerdrop}: a probability, 0 or above and below 1")
    reparam = str(cfg.reparam)
    if reparam != "none" and cfg.qk_clip > 0:
        raise InputError(f"--qk-clip shrinks W, which has no effect under --reparam {reparam}: use one of the two")
    if reparam != "sigma":
        for option, default in (("gamma_init", "one"), ("positive_gamma", False), ("from", None)):
            if getattr(cfg, f"reparam_{option}") != default:
                raise InputError(f"--reparam-{option.replace('_', '-')} belongs to --reparam sigma, not {reparam}")
    if reparam == "none":
        return
    options = {}
    if reparam == "sigma":
        gamma_init = str(cfg.reparam_gamma_init)
        if cfg.reparam_from is not None:
            start_from_checkpoint(model, cfg.reparam_from)
            gamma_init = "spectral"
        elif gamma_init == "one" and str(cfg.norm_placement) in ("deepnorm", "subln"):
            logger.warning(
                f"gamma starts at 1, which undoes the initial weight scales of --norm-placement {cfg.norm_placement}; "
                "--reparam-gamma-init spectral keeps them"
            )
        options = {"gamma_init": gamma_init, "positive_gamma": cfg.reparam_positive_gamma}
    names = REPARAMS[reparam](model, include=LAYERS, **options)
    for _, state in states(model):
        state.gamma.param_group = "gamma"
    logger.info(f"{reparam} reparametrises {len(names)} weights {options or ''}: {_summary(names)}")


def start_from_checkpoint(model: nn.Module, path: str) -> None:
    """Give a model that is not reparametrised yet the weights of a checkpoint, ours or stock fairseq's.

    A missing file is an error only once training begins: a trained model is rebuilt from its options to decode, and
    its start is then of no interest.
    """
    if not Path(path).exists():
        model.missing_start = path
        return
    weights = load_checkpoint(path)["model"]
    weights = {key: value for key, value in weights.items() if not key.endswith(".version")}
    try:
        model.load_state_dict(weights)
    except (RuntimeError, MismatchError):
        raise InputError(f"--reparam-from {path}: {explain_mismatch(model.state_dict(), weights)}") from None


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


class SpectralModel:
    """Mixin: what fairseq does to a model from outside, for reparametrised weights."""

    missing_start: str | None = None  # a --reparam-from that was not there when the model was built

    def set_num_updates(self, num_updates: int) -> None:
        """Before every micro-batch of training."""
        if self.missing_start is not None:
            raise InputError(f"--reparam-from {self.missing_start}: no such file")
        super().set_num_updates(num_updates)

    def load_state_dict(self, *args: object, **kwargs: object) -> object:
        """A loaded checkpoint is a start."""
        self.missing_start = None
        return super().load_state_dict(*args, **kwargs)

    def make_generation_fast_(self, **kwargs: object) -> None:
        """fairseq-generate and -interactive decode with plain weights, at plain speed."""
        fold(self)
        super().make_generation_fast_(**kwargs)


def set_defaults(args: Namespace, **values: object) -> None:
    """In a named architecture: what the command line did not set."""
    for name, value in values.items():
        setattr(args, name, getattr(args, name, value))
