"""Why a checkpoint does not fit a model, in one line that names layers, depths and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

from speech_mt.errors import InputError

_LAYER = re.compile(r"(.*?\blayers)\.(\d+)\.")


class MismatchError(InputError):
    """A checkpoint's weights do not fit the model; the message is :func:`explain_mismatch`'s."""


def explain_mismatch(model_state: Mapping[str, Tensor], checkpoint_state: Mapping[str, Tensor]) -> str:
    """Compare two state dicts: first depth, then parametrization, then other names, then shapes.

    Args:
        model_state: the model's state dict. checkpoint_state: the checkpoint's ``model`` entry.
    """
    reasons = []
    model_layers, stored_layers = _layers(model_state), _layers(checkpoint_state)
    shared: set[tuple[str, int]] = set()
    for stack in sorted(model_layers.keys() | stored_layers.keys()):
        built, stored = model_layers.get(stack, set()), stored_layers.get(stack, set())
        shared |= {(stack, layer) for layer in built & stored}
        for side, layers in (("checkpoint", built - stored), ("model", stored - built)):
            if layers:
                numbers = ", ".join(map(str, sorted(layers)))
                depths = f"the model has {len(built)}, the checkpoint {len(stored)}"
                reasons.append(f"{stack}: {depths} (the {side} lacks {numbers})")

    def only_in(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
        """Names that the other side lacks, but for the layers that it lacks altogether."""
        names = sorted(one.keys() - other.keys())
        return [n for n in names if (m := _LAYER.match(n)) is None or (m[1], int(m[2])) in shared]

    missing, extra = only_in(model_state, checkpoint_state), only_in(checkpoint_state, model_state)
    for side, names in (("model", missing), ("checkpoint", extra)):
        if reparametrised := [name for name in names if ".parametrizations." in name]:
            example = reparametrised[0]
            reasons.append(f"only the {side} has reparametrised weights ({example}): use the same --reparam")
            missing, extra = [], []  # the plain weights of the other side say the same again
    if missing:
        reasons.append(f"not in the checkpoint: {name_some(missing)}")
    if extra:
        reasons.append(f"not in the model: {name_some(extra)}")
    shapes = [
        f"{name} is {tuple(weight.shape)} in the model, {tuple(checkpoint_state[name].shape)} in the file"
        for name, weight in model_state.items()
        if name in checkpoint_state and checkpoint_state[name].shape != weight.shape
    ]
    return "the checkpoint does not fit the model: " + "; ".join(reasons + shapes[:3])


def _layers(state: Mapping[str, Tensor]) -> dict[str, set[int]]:
    """The layer numbers of every stack, such as ``{"encoder.layers": {0, 1}}``."""
    layers: dict[str, set[int]] = {}
    for match in filter(None, map(_LAYER.match, state)):
        layers.setdefault(match[1], set()).add(int(match[2]))
    return layers


def name_some(names: Iterable[str], limit: int = 3) -> str:
    """The first few of many names: ``a, b, c and 7 more``."""
    names = sorted(names)
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")
