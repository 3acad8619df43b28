"""A checkpoint of the plugin as one of stock fairseq: everything that folds is folded into plain weights.

sigmaReparam, spectral norm and weight norm become W_hat, a value spectrum its W_V and W_O. DeepNorm and Admin become
plain post-LN, since LayerNorm does not see the scale of its input (up to its eps):  LN(a x + f(x)) = LN(x + f(x) / a),
so the weight and bias of the last linear map of each branch are divided by a.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from speech_mt.errors import InputError
from speech_mt.modules.residual import residual_scale
from speech_mt.modules.token_mixing import token_mixings
from speech_mt.reparam import fold_state_dict

FOLDABLE_PLACEMENTS = ("post", "pre", "deepnorm", "admin")
_STOCK_CRITERIONS = {"label_smoothed_cross_entropy_with_entropy": "label_smoothed_cross_entropy"}
_BRANCH_ENDS = (".self_attn.out_proj.", ".encoder_attn.out_proj.", ".fc2.")
_OURS = ("reparam", "norm_placement", "qk_norm", "attention_softcap", "qk_clip", "layerdrop", "monitor")
_OURS += ("value_spectrum", "value_basis", "token_mixing", "neutreno_lambda")
_WHY_NOT = {
    "attn_scale": "scales attention against the mean of the visible values at run time",
    "feat_scale": "scales the mean of the tokens against the rest at run time",
    "neutreno": "adds the values of the first layer to the others' at run time",
}


def why_not_stock(model_cfg: dict[str, Any]) -> list[str]:
    """What keeps a model from being one of stock fairseq; empty if nothing does."""
    reasons = []
    if model_cfg["_name"].startswith("spectral_masked_lm"):
        reasons.append(f"stock fairseq has no model like {model_cfg['_name']}")
    elif not model_cfg["_name"].startswith("spectral_transformer"):
        reasons.append(f"{model_cfg['_name']} reads features that no stock task makes")
    if model_cfg["norm_placement"] not in FOLDABLE_PLACEMENTS:
        reasons.append(f"stock fairseq has no --norm-placement {model_cfg['norm_placement']}")
    if model_cfg["qk_norm"]:
        reasons.append("--qk-norm normalises at run time")
    if model_cfg["attention_softcap"] > 0:
        reasons.append("--attention-softcap acts on the logits at run time")
    for name in token_mixings(model_cfg.get("token_mixing", "")):
        reasons.append(f"--token-mixing {name} {_WHY_NOT[name]}")
    return reasons


def fold_checkpoint(state: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Fold a loaded checkpoint, for decoding or as the start of a new training.

    Returns:
        the folded checkpoint without optimizer state, and the reasons why it is still one of the plugin
        (empty: stock fairseq loads it with no ``--user-dir``).

    Raises:
        InputError: it is no checkpoint of this plugin's models, or one whose options are not as they were written.
    """
    model_cfg = (state.get("cfg") or {}).get("model") or {}
    if not str(model_cfg.get("_name")).startswith("spectral_"):
        raise InputError(f"a model {model_cfg.get('_name')!r} is not one of speech_mt's: there is nothing to fold")
    try:
        return _fold(state, state["cfg"], model_cfg)
    except (KeyError, TypeError) as error:
        raise InputError(f"the options in the checkpoint are not those of a {model_cfg['_name']} ({error})") from error


def _fold(state: dict[str, Any], cfg: dict[str, Any], model_cfg: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    weights = fold_state_dict(state["model"], model_cfg["reparam_positive_gamma"])
    reasons = why_not_stock(model_cfg)
    plain = {**model_cfg, "reparam": "none", "reparam_gamma_init": "one", "reparam_positive_gamma": False}
    plain |= {"reparam_from": None, "value_spectrum": "free", "value_basis": "orthogonal"}
    folded_cfg = {**cfg, "model": plain}
    if not reasons:
        _fold_residual_scale(weights, model_cfg)
        weights["encoder.version"] = weights["decoder.version"] = torch.Tensor([3])
        folded_cfg["model"] = stock_model_cfg(model_cfg)
        folded_cfg["common"] = {**cfg["common"], "user_dir": None}
        folded_cfg["criterion"] = _stock_criterion(cfg["criterion"])
    folded = {**state, "model": weights, "cfg": folded_cfg}
    folded.pop("last_optimizer_state", None)
    return folded, reasons


def _fold_residual_scale(weights: dict[str, Tensor], model_cfg: dict[str, Any]) -> None:
    depth = model_cfg["encoder_layers"], model_cfg["decoder_layers"]
    for name, weight in weights.items():
        if any(end in name for end in _BRANCH_ENDS):
            scale = residual_scale(model_cfg["norm_placement"], *depth, decoder=name.startswith("decoder."))
            weights[name] = weight / scale if scale != 1 else weight


def stock_model_cfg(model_cfg: dict[str, Any]) -> dict[str, Any]:
    """The options of fairseq's ``transformer`` that compute what a folded ``spectral_transformer`` computes."""
    stock = {key: value for key, value in model_cfg.items() if not key.startswith(_OURS)}
    for option in ("embed_dim", "ffn_embed_dim", "attention_heads"):
        stock[f"decoder_{option}"] = model_cfg[f"decoder_{option}"] or model_cfg[f"encoder_{option}"]
    stock["_name"] = stock["arch"] = "transformer"
    stock["encoder_normalize_before"] = stock["decoder_normalize_before"] = model_cfg["norm_placement"] == "pre"
    stock["decoder_input_dim"] = stock["decoder_output_dim"] = stock["decoder_embed_dim"]
    if stock["share_all_embeddings"]:
        stock["share_decoder_input_output_embed"] = True
    return stock


def _stock_criterion(criterion: dict[str, Any]) -> dict[str, Any]:
    ours = ("monitor", "z_loss", "on_collapse", "collapse_patience", "sharpness_interval", "temperature_intervention")
    ours += ("skip_nonfinite", "rollback_on_spike")
    stock = {key: value for key, value in criterion.items() if not key.startswith(ours)}
    stock["_name"] = _STOCK_CRITERIONS.get(stock["_name"], stock["_name"])
    return stock
