"""What the three models share: weights under control while training, plain weights for decoding."""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from dataclasses import fields
from pathlib import Path

from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.tasks import FairseqTask
from omegaconf import DictConfig
from torch import nn

from speech_mt.checkpoint import MismatchError, explain_mismatch, load_checkpoint
from speech_mt.errors import InputError
from speech_mt.models.config import NEUTRENO_LAMBDA, EncoderConfig
from speech_mt.modules.residual import init_gain
from speech_mt.modules.token_mixing import token_mixings
from speech_mt.optim.weight_decay import exclude_controls
from speech_mt.ranges import COUNT, NOT_NEGATIVE, POSITIVE, PROBABILITY, Range, check_ranges
from speech_mt.reparam import REPARAMS, fold, states, value_spectrum
from speech_mt.reparam.value_projections import SpectralProjection

logger = logging.getLogger(__name__)

RANGES = {
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), Range(0, 1)),
    **{f"{side}_{name}": COUNT for side in ("encoder", "decoder") for name in ("embed_dim", "ffn_embed_dim", "layers")},
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "conv_channels"), COUNT),
    **dict.fromkeys(("max_source_positions", "max_target_positions"), COUNT),
    **dict.fromkeys(("attention_softcap", "qk_clip", "ctc_weight"), NOT_NEGATIVE),  # 0 is off
    "neutreno_lambda": POSITIVE,
    "layerdrop": PROBABILITY,
}
LAYERS = r"(^|\.)layers\.\d+\."  # every Linear in the layers; embeddings, front end and output stay as they are


def check_config(cfg: EncoderConfig) -> None:
    """Refuse numbers that no model can have, before one is built.

    Raises:
        InputError: naming the option, its value and where it has to lie.
    """
    check_ranges(cfg, RANGES)


def check_speech_task(model: type[nn.Module], task: FairseqTask) -> None:
    """Refuse to build a speech model for a task that has no filterbanks.

    Raises:
        InputError: naming the task that has.
    """
    if not hasattr(task.cfg, "num_mel_bins"):
        raise InputError(f"{model.__name__} reads speech, which {type(task).__name__} is not: --task speech_manifest")


def reparametrize(model: nn.Module, cfg: EncoderConfig) -> None:
    """Apply ``--value-spectrum`` and ``--reparam`` to a new model, log what they took, and refuse what cannot mean
    anything.

    gamma belongs to the optimizer's parameter group ``gamma``: it shares the learning rate and weight decay of all
    parameters, unless ``optimizer: composite`` gives that group its own. Those of the controls of oversmoothing are
    the group ``undecayed``: as all others, without weight decay.

    Raises:
        InputError: options that contradict each other.
    """
    reparam = str(cfg.reparam)
    if reparam != "none" and cfg.qk_clip > 0:
        raise InputError(f"--qk-clip shrinks W, which has no effect under --reparam {reparam}: use one of the two")
    if reparam != "sigma":
        for option, default in (("gamma_init", "one"), ("positive_gamma", False), ("from", None)):
            if getattr(cfg, f"reparam_{option}") != default:
                raise InputError(f"--reparam-{option.replace('_', '-')} belongs to --reparam sigma, not {reparam}")
    control_oversmoothing(model, cfg)
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
    names = REPARAMS[reparam](model, include=LAYERS, exclude=_controlled(model), **options)
    taken = _summary(names)
    if getattr(cfg, "reparam_output", False) and model.encoder.ctc_proj is not None:
        names += REPARAMS[reparam](model.encoder.ctc_proj, **options)
        taken += "; encoder.ctc_proj"
    for _, state in states(model):
        state.gamma.param_group = "gamma"
    logger.info(f"{reparam} reparametrises {len(names)} weights {options or ''}: {taken}")


def control_oversmoothing(model: nn.Module, cfg: EncoderConfig) -> None:
    """Apply ``--value-spectrum``, and check the options of token mixing, which the layers have.

    Raises:
        InputError: options that contradict each other.
    """
    spectrum, basis, placement = str(cfg.value_spectrum), str(cfg.value_basis), str(cfg.norm_placement)
    mixing = token_mixings(cfg.token_mixing)
    if "neutreno" in mixing:
        if spectrum != "free":
            logger.warning(
                "NeuTRENO adds values to what the theory of --value-spectrum is about: it then predicts less"
            )
    elif cfg.neutreno_lambda != NEUTRENO_LAMBDA:
        raise InputError(f"--neutreno-lambda {cfg.neutreno_lambda} belongs to --token-mixing neutreno")
    if spectrum == "free":
        if basis != "orthogonal":
            raise InputError(f"--value-basis {basis} belongs to --value-spectrum smooth, sharpen or sharpen-first-half")
    else:
        if placement == "subln":
            raise InputError(
                "--value-spectrum controls W_V W_O, and --norm-placement subln has a LayerNorm between the two: use one"
            )
        if cfg.reparam_from is not None:
            raise InputError("--reparam-from starts from plain weights, which --value-spectrum does not have: use one")
        for name, stack in model.named_children():
            if name in ("encoder", "decoder"):
                scale = init_gain(placement, cfg.encoder_layers, getattr(cfg, "decoder_layers", 0), name == "decoder")
                taken = value_spectrum(stack, spectrum, basis, scale)
                logger.info(f"{spectrum} value spectrum, {basis} basis: {_summary([f'{name}.{x}' for x in taken])}")
    exclude_controls(model)


def _controlled(model: nn.Module) -> str | None:
    """A regular expression for the projections whose weights a value spectrum makes."""
    names = [name for name, child in model.named_modules() if isinstance(child, SpectralProjection)]
    return "|".join(f"^{re.escape(name)}$" for name in names) or None


def start_from_checkpoint(model: nn.Module, path: str) -> None:
    """Give a model that is not reparametrised yet the weights of a checkpoint, ours or stock fairseq's.

    A missing file is an error only if nothing else is loaded (see :meth:`SpectralModel.check_start`): a trained model
    is rebuilt from its options to decode or to go on, and its start is then of no interest.
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

    def check_start(self) -> None:
        """Called when a training begins and has loaded no checkpoint, before it reads its data."""
        if self.missing_start is not None:
            raise InputError(f"--reparam-from {self.missing_start}: no such file")

    def load_state_dict(self, *args: object, **kwargs: object) -> object:
        """A loaded checkpoint is a start."""
        self.missing_start = None
        return super().load_state_dict(*args, **kwargs)

    def make_generation_fast_(self, **kwargs: object) -> None:
        """fairseq-generate and -interactive decode with plain weights, at plain speed."""
        fold(self)
        super().make_generation_fast_(**kwargs)


def set_defaults(args: Namespace | DictConfig, **values: object) -> None:
    """In a named architecture: what the command line did not set, or a checkpoint does not know yet.

    fairseq gives a checkpoint the defaults of younger options if it names the model, not if it names an architecture.
    """
    if isinstance(args, DictConfig):
        options = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY[args._name]]
        values = {option.name: option.default for option in fields(options)} | values
    for name, value in values.items():
        setattr(args, name, getattr(args, name, value))
