"""What the controls of oversmoothing cost: training and beam search beside the same model without, interleaved.

    python benchmarks/oversmoothing_cost.py                              # 6L-6L 512/2048/8, 4,096 tokens
    python benchmarks/oversmoothing_cost.py --tokens 256 --rounds 2 --layers 2 --dim 64    # to try it out

Ratios of times within a round, to "ours" without a control and to stock fairseq: 1.05 is a throughput of 1/1.05.
"V from QR alone" is no model: it is the decompositions of one update, the weights made of them and their gradients,
as a share of the step of "ours"; it shows what a value spectrum adds where the models' times are too noisy for that.
Decoding is as fairseq-generate does it: value spectra are folded, token mixing runs.
"""

from __future__ import annotations

import argparse
import time

import torch
from fairseq.sequence_generator import SequenceGenerator
from models import batch, keep_memory, task
from training_step import Step, contestants, measure, report, steppers

from speech_mt.reparam import ValueSpectrum

CONTROLS = ["ours + value spectrum", "ours + value spectrum, general", "ours + AttnScale", "ours + FeatScale"]
CONTROLS += ["ours + NeuTRENO", "ours + sigmaReparam"]
ALONE = {"V from QR alone": "orthogonal", "V from solve alone": "general"}


def spectra(basis: str, layers: int, dim: int) -> Step:
    """What the value spectra of a model of ``layers`` + ``layers`` add to one update."""
    states = [ValueSpectrum(dim, -1, basis) for _ in range(2 * layers)]
    gradients = torch.randn(2, dim, dim).unbind()
    updates = iter(range(10**9))

    def step() -> None:
        update = next(updates)
        for state in states:
            state.set_num_updates(update)
            torch.autograd.backward(state.weights(), gradients)

    return step


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
    alone = {name: spectra(basis, args.layers, args.dim) for name, basis in ALONE.items()}
    print(f"torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds, {args.layers}L of {args.dim}")
    print(f"\ntraining, {args.tokens} tokens")
    seconds = measure(steppers(names, shape, args.tokens) | alone, args.rounds)
    print(report(seconds, pairs + [(name, "ours") for name in alone]), flush=True)
    print(f"\nbeam search, 16 sentences, beam 5, {args.steps} tokens")
    print(report(decode(names, shape, args.rounds, args.steps), pairs))


if __name__ == "__main__":
    main()
