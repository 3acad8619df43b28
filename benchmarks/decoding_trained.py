"""A trained translation model on real sentences: stock fairseq, ours, and CTranslate2, interleaved.

    python benchmarks/decoding_trained.py CHECKPOINT --data BIN [--subset test] [--sentences 200] [--rounds 5]

All decode the same sentences with the same weights, folded, in batches of --batch. Stock fairseq runs them in its own
``transformer``. The time is that of the search, from token numbers to tokens; loading a model is not in it.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import torch
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer import TransformerModel
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationTask
from models import keep_memory
from training_step import report

from speech_mt import load
from speech_mt.checkpoint import load_checkpoint
from speech_mt.checkpoint.ctranslate2_export import export_ctranslate2, stock_model
from speech_mt.errors import run

Translate = Callable[[], list[list[str]]]  # the best hypothesis of each sentence, in the order of the subset
LENGTH = {"max_len_a": 0, "max_len_b": 200}  # fairseq-generate's own limits


def batches(task: TranslationTask, subset: str, sentences: int, size: int) -> list[dict]:
    """The first sentences of a subset, sorted by length as fairseq-generate has them, ``size`` a batch."""
    task.load_dataset(subset)
    dataset = task.dataset(subset)
    order = sorted(range(min(sentences, len(dataset))), key=dataset.num_tokens)
    chosen = [order[i : i + size] for i in range(0, len(order), size)]
    return [dataset.collater([dataset[i] for i in indices]) for indices in chosen]


def fairseq(model: BaseFairseqModel, task: TranslationTask, samples: list[dict], beam: int) -> Translate:
    """As fairseq-generate decodes: what folds is folded before."""
    model.eval()
    model.make_generation_fast_()
    generator = SequenceGenerator([model], task.target_dictionary, beam_size=beam, **LENGTH)

    def translate() -> list[list[str]]:
        found = {}
        for sample in samples:
            for number, hypotheses in zip(sample["id"].tolist(), generator.generate([model], sample), strict=True):
                found[number] = [task.target_dictionary[token] for token in hypotheses[0]["tokens"][:-1]]
        return [found[number] for number in sorted(found)]

    return translate


def ctranslate2(folder: Path, precision: str, task: TranslationTask, samples: list[dict], args: Namespace) -> Translate:
    """The exported model; it adds the end of a sentence and sorts by length itself."""
    from ctranslate2 import Translator

    translator = Translator(str(folder), compute_type=precision, intra_threads=args.threads)
    dictionary = task.source_dictionary
    rows = chain.from_iterable(zip(s["id"].tolist(), s["net_input"]["src_tokens"], strict=True) for s in samples)
    sources = [
        [dictionary[t] for t in tokens[:-1] if t != dictionary.pad()]
        for _, tokens in sorted(rows, key=lambda row: row[0])
    ]

    def translate() -> list[list[str]]:
        limits = {"max_batch_size": args.batch, "max_decoding_length": LENGTH["max_len_b"]}
        return [r.hypotheses[0] for r in translator.translate_batch(sources, beam_size=args.beam, **limits)]

    return translate


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--data", type=Path, required=True, help="folder of fairseq-preprocess")
    parser.add_argument("--subset", default="test")
    parser.add_argument("--sentences", type=int, default=200)
    parser.add_argument("--batch", type=int, default=64, help="sentences")
    parser.add_argument("--beam", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    state = load_checkpoint(args.checkpoint)
    translator = load(args.checkpoint, device="cpu", data=args.data)
    task = translator.task
    samples = batches(task, args.subset, args.sentences, args.batch)
    weights, options = stock_model(state)
    stock = TransformerModel.build_model(Namespace(**options), task)
    stock.load_state_dict(weights)
    models = {"stock": stock, "ours": translator.model}
    contestants = {name: fairseq(model, task, samples, args.beam) for name, model in models.items()}
    with tempfile.TemporaryDirectory() as folder:
        for precision in ("float32", "int8"):
            out = Path(folder) / precision
            export_ctranslate2(state, args.data, out, quantization=precision)
            contestants[f"CTranslate2 {precision}"] = ctranslate2(out, precision, task, samples, args)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    found = {}
    for round_ in range(args.rounds + 1):
        for name in list(contestants)[:: 1 if round_ % 2 else -1]:
            start = time.perf_counter()
            found[name] = contestants[name]()
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    count = len(found["stock"])
    print(f"{count} sentences of {args.subset}, beam {args.beam}, batches of {args.batch}, {args.threads} threads")
    for name, values in seconds.items():
        same = sum(map(list.__eq__, found[name], found["stock"]))
        print(f"{name:24} {count / statistics.median(values):8.1f} sentences a second, {same} translations as stock")
    print(report(seconds, [(name, "stock") for name in contestants if name != "stock"]))
    return 0


if __name__ == "__main__":
    run(main)
