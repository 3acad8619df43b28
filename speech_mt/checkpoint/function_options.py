"""Which options define the function that a model's weights compute.

The same weights under another ``--norm-placement``, softcap or number of heads fit without an error and compute
something else: such a checkpoint is one of another model. Options of training alone, such as dropout, may change.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

_SHAPES = ("embed_dim", "ffn_embed_dim", "layers")  # explain_mismatch says more about these
_OF_OUR_TRAINING = {
    *("_name", "arch", "activation_dropout", "attention_dropout", "dropout", "layerdrop", "checkpoint_activations"),
    *("reparam_from", "reparam_gamma_init", "qk_clip", "ctc_weight", "max_source_positions", "max_target_positions"),
    *(f"{side}_{shape}" for side in ("encoder", "decoder") for shape in _SHAPES),
    *("conv_channels", "conv_dropout", "cape_global_shift", "cape_local_shift", "cape_global_scale", "init"),
}
_OF_STOCK_FUNCTION = {
    *("activation_fn", "cross_self_attention", "layernorm_embedding", "no_cross_attention", "no_scale_embedding"),
    *("no_token_positional_embeddings", "share_all_embeddings", "share_decoder_input_output_embed"),
    *("encoder_attention_heads", "encoder_learned_pos", "encoder_normalize_before"),
    *("decoder_attention_heads", "decoder_learned_pos", "decoder_normalize_before"),
}


def function_options(model_cfg: Mapping[str, Any] | Namespace) -> dict[str, Any]:
    """The options of a model's config that define its function, with what they leave to others filled in.

    Of our models that is every option but those of training: an option that is new belongs here until it is known not
    to. Of fairseq's, whose old configs hold every option of the command, it is a list.
    """
    cfg = dict(vars(model_cfg) if isinstance(model_cfg, Namespace) else model_cfg)
    if cfg.get("decoder_attention_heads") is None:
        cfg["decoder_attention_heads"] = cfg.get("encoder_attention_heads")
    if cfg.get("share_all_embeddings"):
        cfg["share_decoder_input_output_embed"] = True
    if "norm_placement" in cfg:
        chosen = cfg.keys() - _OF_OUR_TRAINING
    else:
        chosen = cfg.keys() & _OF_STOCK_FUNCTION
        if "encoder_normalize_before" in cfg:  # the one of ours that says the same
            cfg["norm_placement"] = "pre" if cfg["encoder_normalize_before"] else "post"
            chosen.add("norm_placement")
    return {name: cfg[name] for name in sorted(chosen)}


def different_options(
    stored: Mapping[str, Any] | Namespace,
    wanted: Mapping[str, Any] | Namespace,
    defaults: Mapping[str, Any] | None = None,
) -> str:
    """How two models' functions differ by their options: ``--norm-placement is pre, was post``; empty if they do not.

    Args:
        stored, wanted: configs of the checkpoint's model and of the one to be.
        defaults: what an option that the stored config does not know yet stood for.
    """
    old = dict(defaults or {}) | function_options(stored)
    new = function_options(wanted)
    return "; ".join(
        f"--{name.replace('_', '-')} is {_shown(new[name])}, was {_shown(old[name])}"
        for name in sorted(old.keys() & new.keys())
        if _shown(old[name]) != _shown(new[name])
    )


def _shown(value: object) -> str:
    """Enums, their names and numbers alike, as on the command line."""
    value = getattr(value, "value", value)
    return f"{value:g}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value)
