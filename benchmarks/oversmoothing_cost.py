"""What the controls of oversmoothing cost: training and beam search beside the same model without, interleaved.

    python benchmarks/oversmoothing_cost.py                              # 6L-6L 512/2048/8, 4,096 tokens
    python benchmarks/oversmoothing_cost.py --tokens 256 --rounds 2 --layers 2 --dim 64    # to try it out

Ratios of times within a round, to "ours" without a control and to stock fairseq: 1.05 is a throughput of 1/1.05.
Decoding is as fairseq-generate does it: value spectra are folded, token mixing runs.
"""

from __future__ import annotations

import argparse
import time

import torch
from fairseq.sequence_generator import SequenceGenerator
from models import batch, keep_memory, task
from training_step import contestants, measure, report, steppers

CONTROLS = ["ours + value spectrum", "ours + value spectrum, general", "ours + AttnScale", "ours + FeatScale"]
CONTROLS += ["ours + NeuTRENO", "ours + sigmaReparam"]


def decode(names: list[str], shape: dict, rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds to translate 16 sentences with beam 5, by contestant and round."""
    models = contestants(names, shape)
    dictionary = task(shape["vocabulary"]).target_dictionary
    sample = batch(16, steps, shape["vocabulary"])
    generators = {}
    for name, model in models.items():
        model.make_generation_fast_()
        generators[name] = SequenceGenerator([model], dictionary, beam_size=5, max_len_b=steps, min_len=steps)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        for name in names[:: 1 if round_ % 2 else -1]:
            start = time.perf_counter()
            generators[name].generate([models[name]], sample)
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="at least 2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=4096, help="of a training step")
    parser.add_argument("--steps", type=int, default=24, help="tokens of each hypothesis")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--dim", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    shape = {"layers": args.layers, "dim": args.dim, "ffn": 4 * args.dim, "heads": 8, "vocabulary": 1000}
    names = ["stock", "ours", *CONTROLS]
    pairs = [("ours", "stock")] + [(name, "ours") for name in CONTROLS]
    print(f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds, {args.layers}L of {args.dim}")
    print(f"\ntraining, {args.tokens} tokens")
    print(report(measure(steppers(names, shape, args.tokens), args.rounds), pairs), flush=True)
    print(f"\nbeam search, 16 sentences, beam 5, {args.steps} tokens")
    print(report(decode(names, shape, args.rounds, args.steps), pairs))


if __name__ == "__main__":
    main()
