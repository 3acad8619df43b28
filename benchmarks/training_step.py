"""Time of a training step (forward, loss, backward, clip, Adam), all contestants interleaved.

    python benchmarks/training_step.py                    # 6L-6L 512/2048/8, 4,096 tokens
    python benchmarks/training_step.py --depths           # width 64, from 6L-6L to 100L-100L

Machines are noisy: only ratios within one round count; the table gives their median and quartiles.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models import BaseFairseqModel
from fairseq.optim.adam import Adam
from models import batch, build, keep_memory, task
from quartiles import quartiles
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from speech_mt.criterions.monitored import LabelSmoothedConfig, LabelSmoothedCrossEntropyWithEntropy

Step = Callable[[], None]
NAMES = [
    "stock",
    "ours",
    "ours + monitor",
    "ours + monitor every update",
    "ours + sigmaReparam",
    "ours + value spectrum",
    "torch spectral_norm",
    "power iteration each forward",
]
OPTIONS = {  # of a contestant's model; those that are not in NAMES are oversmoothing_cost.py's
    "ours + sigmaReparam": {"reparam": "sigma"},
    "ours + value spectrum": {"value_spectrum": "sharpen"},
    "ours + value spectrum, general": {"value_spectrum": "sharpen", "value_basis": "general"},
    "ours + AttnScale": {"token_mixing": "attn_scale"},
    "ours + FeatScale": {"token_mixing": "feat_scale"},
    "ours + NeuTRENO": {"token_mixing": "neutreno"},
}
TOKENS_BY_DEPTH, DEPTHS = 1024, (6, 18, 50, 100)
SHAPE = {"layers": 6, "dim": 512, "ffn": 2048, "heads": 8, "vocabulary": 1000}


class PowerIterationEachForward(nn.Module):
    """sigmaReparam as usually published: a power step in every forward pass, gradient by autograd."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(1))
        self.register_buffer("u", nn.functional.normalize(torch.randn(weight.shape[1]), dim=0))

    def forward(self, weight: Tensor) -> Tensor:
        with torch.no_grad():
            v = nn.functional.normalize(weight @ self.u, dim=0)
            u = nn.functional.normalize(weight.T @ v, dim=0)
            self.u.copy_(u)
        return self.gamma / (v @ weight @ u) * weight


def layer_linears(model: nn.Module) -> list[nn.Linear]:
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and ".layers." in name]


def contestants(names: list[str], shape: dict) -> dict[str, BaseFairseqModel]:
    made = {}
    for name in names:
        made[name] = build("stock" if name == "stock" else "ours", **shape, **OPTIONS.get(name, {}))
        if name == "torch spectral_norm":
            for linear in layer_linears(made[name]):
                parametrizations.spectral_norm(linear)
        if name == "power iteration each forward":
            for linear in layer_linears(made[name]):
                parametrization = PowerIterationEachForward(linear.weight)
                parametrize.register_parametrization(linear, "weight", parametrization)
    return made


def stepper(name: str, model: BaseFairseqModel, sample: dict, vocabulary: int) -> Step:
    """A function that runs one update of ``model``."""
    if "monitor" in name:
        interval = 1 if "every" in name else 10
        cfg = LabelSmoothedConfig(label_smoothing=0.1, sentence_avg=False, monitor_interval=interval)
        criterion = LabelSmoothedCrossEntropyWithEntropy.build_criterion(cfg, task(vocabulary))
    else:
        criterion = LabelSmoothedCrossEntropyCriterion(task(vocabulary), sentence_avg=False, label_smoothing=0.1)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = Adam(parameters, lr=1e-4)
    updates = iter(range(10**9))

    def step() -> None:
        model.set_num_updates(next(updates))
        optimizer.zero_grad()
        loss, size, _ = criterion(model, sample)
        (loss / size).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
        optimizer.step()

    return step


def steppers(names: list[str], shape: dict, tokens: int) -> dict[str, Step]:
    """The update of each contestant."""
    sample = batch(tokens // 32, 32, shape["vocabulary"])
    models = contestants(names, shape)
    return {name: stepper(name, model.train(), sample, shape["vocabulary"]) for name, model in models.items()}


def measure(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Seconds a step, by contestant and round."""
    names = list(steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for name in names:
        steps[name]()  # warm up
    for round_ in range(rounds):
        order = names if round_ % 2 == 0 else names[::-1]
        for name in order:
            start = time.perf_counter()
            steps[name]()
            seconds[name].append(time.perf_counter() - start)
        print(f"round {round_ + 1}:", *(f"{seconds[name][-1]:.2f}" for name in names), file=sys.stderr, flush=True)
    return seconds


def peak_resident() -> float:
    """GiB, at most, of this process; its parent's, which ru_maxrss would count, are not among them."""
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 2**20


def peak_memory(name: str, arguments: list[str]) -> float:
    """GiB that two steps of one contestant take, in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--peak-of", name]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def report(seconds: dict[str, list[float]], pairs: list[tuple[str, str]]) -> str:
    lines = [f"{'':44} {'median':>8} {'quartiles':>16}"]
    for name, values in seconds.items():
        lines.append(f"{name + ', s a step':44} {statistics.median(values):8.3f}")
    for above, below in pairs:
        ratios = [a / b for a, b in zip(seconds[above], seconds[below], strict=True)]
        low, median, high = quartiles(ratios)
        lines.append(f"{above + ' / ' + below:44} {median:8.3f} {low:7.3f} to {high:.3f}")
    return "\n".join(lines)


def depths(names: list[str], rounds: int) -> str:
    """Step time from 6L-6L to 100L-100L at width 64: does it grow faster than the number of layers?

    One measurement is as many steps as make some 100 layers, so that short steps are as well measured as long ones;
    growth is the time a layer, relative to that of 6L-6L in the same round.
    """
    shape = {"dim": 64, "ffn": 256, "heads": 4, "vocabulary": 256}
    steps = {
        f"{layers}L-{layers}L {name}": repeated(step, 100 // layers)
        for layers in DEPTHS
        for name, step in steppers(names, {"layers": layers, **shape}, TOKENS_BY_DEPTH).items()
    }
    seconds = measure(steps, rounds)
    lines = [f"{'':44} {'s a step':>8} {'growth':>8} {'quartiles':>16}"]
    for name in names:
        a_layer = {
            layers: [t / (100 // layers) / layers for t in seconds[f"{layers}L-{layers}L {name}"]] for layers in DEPTHS
        }
        for layers, times in a_layer.items():
            growth = [t / first for t, first in zip(times, a_layer[DEPTHS[0]], strict=True)]
            low, median, high = quartiles(growth)
            label, step = f"{layers}L-{layers}L {name}", statistics.median(times) * layers
            lines.append(f"{label:44} {step:8.3f} {median:8.3f} {low:7.3f} to {high:.3f}")
    return "\n".join(lines)


def repeated(step: Step, times: int) -> Step:
    def steps() -> None:
        for _ in range(times):
            step()

    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--contestants", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="some of them")
    parser.add_argument("--depths", action="store_true", help="step time against depth instead")
    parser.add_argument("--peak-of", choices=NAMES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    if args.peak_of:
        measure(steppers([args.peak_of], SHAPE, args.tokens), rounds=1)
        print(peak_resident())
        return
    tokens = TOKENS_BY_DEPTH if args.depths else args.tokens
    print(f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds, {tokens} tokens", flush=True)
    if args.depths:
        print(depths(args.contestants, args.rounds), flush=True)
        return
    seconds = measure(steppers(args.contestants, SHAPE, args.tokens), args.rounds)
    baseline = {name: "ours" for name in args.contestants} | {"ours": "stock"}
    pairs = [(name, baseline[name]) for name in args.contestants if name != "stock" and baseline[name] in seconds]
    print(report(seconds, pairs), flush=True)
    for name in args.contestants:
        peak = peak_memory(name, ["--threads", str(args.threads), "--tokens", str(args.tokens)])
        print(f"{name + ', peak memory of the process, GiB':60} {peak:8.2f}", flush=True)


if __name__ == "__main__":
    main()
