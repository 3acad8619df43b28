"""The mean of several checkpoints of one training."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from speech_mt.checkpoint.function_options import different_options
from speech_mt.checkpoint.loading import load_checkpoint
from speech_mt.checkpoint.mismatch import name_some
from speech_mt.errors import InputError


def average_checkpoints(paths: Iterable[str | os.PathLike[str]]) -> dict[str, Any]:
    """Average the weights of checkpoints of one training, one file in memory at a time.

    Floating-point weights are summed and stored in float32 (float64 in float64). Counters, options and the
    rest are the last checkpoint's, without the optimizer's state and EMA, which belong to no averaged model.
    Source: Vaswani et al. 2017, section 6.1.

    Raises:
        InputError: no path; a checkpoint that does not load; names, shapes or options of the function that differ, and
            which.
    """
    paths = list(paths)
    if not paths:
        raise InputError("no checkpoints to average")
    total: dict[str, Tensor] = {}
    first_cfg = None
    for path in paths:
        state = load_checkpoint(path)
        weights, cfg = state["model"], (state.get("cfg") or {}).get("model") or state.get("args")
        first_cfg = first_cfg or cfg
        if cfg and (difference := different_options(first_cfg, cfg)):
            raise InputError(f"cannot average {path} with {paths[0]}: {difference}")
        if total and (difference := _difference(weights, total)):
            raise InputError(f"cannot average {path} with {paths[0]}: {difference}")
        for name, weight in weights.items():
            if not weight.is_floating_point():
                total[name] = weight.clone()
            elif name in total:
                total[name] += weight
            else:
                total[name] = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True)

    owners: dict[tuple[Any, ...], str] = {}
    for name, weight in weights.items():
        owner = owners.setdefault((weight.data_ptr(), weight.shape, weight.stride()), name)
        if owner != name:
            total[name] = total[owner]  # tied weights stay tied, and are written once
        elif weight.is_floating_point():
            total[name] /= len(paths)

    # A mean of unit vectors is no unit vector: sigmaReparam's u and v are estimated anew.
    if any(".parametrizations." in name for name in total):
        from speech_mt.reparam import reestimate_state_dict

        total = reestimate_state_dict(total)

    state["model"] = total
    state.pop("last_optimizer_state", None)
    for name in ("ema", "ema_fp32_params"):
        state.get("extra_state", {}).pop(name, None)
    return state


def _difference(weights: Mapping[str, Tensor], first: Mapping[str, Tensor]) -> str:
    """How names or shapes of a checkpoint (the former) and the first one (the latter) differ, if they do."""
    reasons = []
    for side, names in (("former", first.keys() - weights.keys()), ("latter", weights.keys() - first.keys())):
        if names:
            reasons.append(f"the {side} lacks {name_some(names)}")
    for name in sorted(weights.keys() & first.keys()):
        if weights[name].shape != first[name].shape:
            shapes = tuple(weights[name].shape), tuple(first[name].shape)
            reasons.append(f"{name} is {shapes[0]} in the former, {shapes[1]} in the latter")
    return "; ".join(reasons[:4])
