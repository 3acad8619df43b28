"""Beam search: ours (folded, as fairseq-generate decodes) against stock fairseq with the same weights, interleaved.

python benchmarks/decoding.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import time

import torch
from fairseq.sequence_generator import SequenceGenerator
from models import batch, build, keep_memory, task
from training_step import SHAPE, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--steps", type=int, default=24, help="tokens of each hypothesis")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    dictionary = task(SHAPE["vocabulary"]).target_dictionary
    sigma = build("ours", **SHAPE, reparam="sigma", reparam_gamma_init="spectral")
    models = {"stock": build("stock", **SHAPE), "ours, folded sigmaReparam": sigma}
    sample = batch(16, 24, SHAPE["vocabulary"])
    generators = {}
    for name, model in models.items():
        model.make_generation_fast_()
        options = {"beam_size": 5, "max_len_b": args.steps, "min_len": args.steps}
        generators[name] = SequenceGenerator([model], dictionary, **options)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    found = {}
    for round_ in range(args.rounds + 1):
        for name in list(models)[:: 1 if round_ % 2 else -1]:
            start = time.perf_counter()
            found[name] = generators[name].generate([models[name]], sample)
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    first = [[hypotheses[0]["tokens"] for hypotheses in sentences] for sentences in found.values()]
    same = sum(map(torch.equal, *first))
    print(f"16 sentences, beam 5, {args.steps} tokens, 6L-6L 512/2048/8; {same} of 16 best hypotheses equal")
    print(report(seconds, [("ours, folded sigmaReparam", "stock")]))


if __name__ == "__main__":
    main()
