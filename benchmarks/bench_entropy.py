"""Time and memory of exact attention entropy against softmax-then-sum, in one interleaved run on the CPU.

    python benchmarks/bench_entropy.py [--threads 1] [--lengths 400 1600] [--repeats 15]

Every round runs every method once, so that a busy machine slows all of them alike; a ratio is the median
over rounds of softmax-then-sum's time divided by the method's. Memory is the growth of the process's peak
while one call runs, in a fresh process (Linux).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from quartiles import quartiles
from torch import Tensor

from speech_mt.diagnostics.attention_entropy import attention_entropy, attention_rows, max_logit

BASELINE = "softmax-then-sum"


@torch.no_grad()
def softmax_then_sum(q: Tensor, k: Tensor) -> Tensor:
    """The usual way: the whole (B, H, T, T) attention matrix, then -sum p log p over the keys."""
    p = (q @ k.transpose(-1, -2) * q.size(-1) ** -0.5).softmax(-1)
    return -(p * (p + 1e-9).log()).sum(-1)


@torch.no_grad()
def log_softmax_then_sum(q: Tensor, k: Tensor) -> Tensor:
    """The fastest way found that forms the matrix; it cannot take a mask, for 0 * -inf is NaN."""
    log_p = (q @ k.transpose(-1, -2) * q.size(-1) ** -0.5).log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


METHODS: dict[str, Callable] = {
    BASELINE: softmax_then_sum,
    "log-softmax-then-sum": log_softmax_then_sum,
    "attention_entropy": attention_entropy,
    "attention_rows": attention_rows,
    "max_logit": max_logit,
}


def draw(batch: int, heads: int, length: int, size: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, batch, heads, length, size, generator=generator)
    return q, k


def times(q: Tensor, k: Tensor, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, one round after another, after one warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(repeats + 1):
        for name, method in METHODS.items():
            start = time.perf_counter()
            method(q, k)
            seconds[name].append(time.perf_counter() - start)
    return {name: values[1:] for name, values in seconds.items()}


def peak_growth(method: str, shape: list[int], threads: int) -> str:
    """Growth of peak memory in MiB during one call, measured in a fresh process."""
    if not Path("/proc/self/clear_refs").exists():
        return "n/a"
    arguments = [sys.executable, __file__, "--threads", str(threads), "--measure", method, *map(str, shape)]
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout.strip()


def measure(method: str, shape: list[int]) -> None:
    METHODS[method](*draw(1, 1, 8, shape[-1]))  # everything that is loaded on first use
    q, k = draw(*shape)
    Path("/proc/self/clear_refs").write_text("5")  # peak := now
    before = _status("VmRSS")
    METHODS[method](q, k)
    print(f"{(_status('VmHWM') - before) / 1024:.1f}")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=int, nargs="+", default=[400, 1600])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.measure:
        method, *shape = arguments.measure
        return measure(method, [int(x) for x in shape])

    print(f"torch {torch.__version__}, {arguments.threads} thread(s), float32, {arguments.repeats} rounds")
    heads = f"{'B, H, T, d':>16}  {'method':<21}{'ms (quartiles)':>26}"
    print(heads + f"{'times faster (quartiles)':>26}{'peak MiB':>10}")
    for length in arguments.lengths:
        shape = [arguments.batch, arguments.heads, length, arguments.head_size]
        q, k = draw(*shape)
        torch.testing.assert_close(attention_entropy(q, k), softmax_then_sum(q, k), atol=1e-5, rtol=0)
        seconds = times(q, k, arguments.repeats)
        for name in METHODS:
            ms = [1e3 * s for s in seconds[name]]
            ratios = [base / s for base, s in zip(seconds[BASELINE], seconds[name], strict=True)]
            memory = peak_growth(name, shape, arguments.threads)
            print(f"{str(shape)[1:-1]:>16}  {name:<21}{_spread(ms):>26}{_spread(ratios):>26}{memory:>10}")
    return None


def _spread(values: list[float]) -> str:
    low, median, high = quartiles(values)
    return f"{median:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
