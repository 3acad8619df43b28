"""How many ATen calls an update makes for the reparametrisation, a weight: free of noise, and time on a GPU.

    python benchmarks/aten_calls.py

Counted with a dispatch mode over set_num_updates, forward, backward, gradient clipping and fairseq's Adam; what the
same model without reparametrisation calls is subtracted. The width does not matter, so it is small. The backward pass
is written once for a GPU, in few calls, and once for a CPU, in few passes over memory: both are counted, here on a CPU.
"""

from __future__ import annotations

from unittest import mock

import torch
from models import batch
from torch.utils._python_dispatch import TorchDispatchMode
from training_step import contestants, layer_linears, stepper

from speech_mt.reparam import sigma

NAMES = ("ours + sigmaReparam", "torch spectral_norm", "power iteration each forward")


class Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        self.calls += 1
        return func(*args, **(kwargs or {}))


def calls(name: str, layers: int) -> tuple[int, int]:
    """(ATen calls of one update, number of weights)."""
    shape = {"layers": layers, "dim": 16, "ffn": 32, "heads": 2, "vocabulary": 100}
    model = contestants([name], shape)[name].train()
    step = stepper(name, model, batch(4, 8, 100), 100)
    step()
    with Counter() as counter:
        step()
    return counter.calls, len(layer_linears(model))


def main() -> None:
    torch.manual_seed(0)
    for layers in (6, 100):
        plain, weights = calls("ours", layers)
        print(f"{layers}L-{layers}L, {weights} weights, {plain} calls without reparametrisation; extra calls:")
        extra = {name: calls(name, layers)[0] - plain for name in NAMES}
        with mock.patch.object(sigma, "_rescale_in_few_passes", sigma._rescale_in_few_calls):
            extra = {f"{NAMES[0]}, as on a GPU": calls(NAMES[0], layers)[0] - plain, **extra}
        for name, count in extra.items():
            print(f"  {name:32} {count:7} {count / weights:6.1f} a weight")


if __name__ == "__main__":
    main()
