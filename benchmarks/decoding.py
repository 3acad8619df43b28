"""Beam search, sentences a second: stock fairseq, ours folded, and CTranslate2 with the same weights, interleaved.

    python benchmarks/decoding.py [--rounds 9] [--threads 1]

Without CTranslate2 (pip install 'speech_mt[deploy]') the other two run alone.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from fairseq.models import BaseFairseqModel
from fairseq.sequence_generator import SequenceGenerator
from models import batch, build, keep_memory, stock_options, task
from training_step import SHAPE, report

from speech_mt.checkpoint.ctranslate2_export import export_ctranslate2
from speech_mt.errors import InputError

VOCABULARY = SHAPE["vocabulary"]
SENTENCES = 16
BEAM = 5

Translate = Callable[[], list[list[str]]]  # the best hypothesis of each sentence


def sentences() -> dict:
    """A batch whose sources end as sentences do; CTranslate2 adds that end itself."""
    sample = batch(SENTENCES, 24, VOCABULARY)
    sample["net_input"]["src_tokens"][:, -1] = task(VOCABULARY).source_dictionary.eos()
    return sample


def fairseq(model: BaseFairseqModel, steps: int) -> Translate:
    """As fairseq-generate decodes: what folds is folded before."""
    dictionary = task(VOCABULARY).target_dictionary
    model.make_generation_fast_()
    generator = SequenceGenerator([model], dictionary, beam_size=BEAM, max_len_b=steps, min_len=steps)
    sample = sentences()

    def translate() -> list[list[str]]:
        found = generator.generate([model], sample)
        return [[dictionary[token] for token in sentence[0]["tokens"][:-1]] for sentence in found]

    return translate


def ctranslate2(folder: str, compute_type: str, steps: int, threads: int) -> Translate:
    """The converted model."""
    from ctranslate2 import Translator

    dictionary = task(VOCABULARY).source_dictionary
    tokens = sentences()["net_input"]["src_tokens"]
    sources = [[dictionary[token] for token in source[:-1] if token != dictionary.pad()] for source in tokens]
    translator = Translator(folder, compute_type=compute_type, intra_threads=threads)

    def translate() -> list[list[str]]:
        results = translator.translate_batch(
            sources, beam_size=BEAM, min_decoding_length=steps, max_decoding_length=steps
        )
        return [result.hypotheses[0] for result in results]

    return translate


def convert(model: BaseFairseqModel, folder: Path) -> str:
    """The stock model for CTranslate2.

    Raises:
        InputError: CTranslate2 is not installed.
    """
    dictionary = task(VOCABULARY).source_dictionary
    for language in ("de", "en"):
        dictionary.save(str(folder / f"dict.{language}.txt"))
    shape = {name: size for name, size in SHAPE.items() if name != "vocabulary"}
    options = stock_options(**shape) | {"_name": "transformer", "share_decoder_input_output_embed": True}
    state = {
        "model": model.state_dict(),
        "cfg": {"model": options, "task": {"source_lang": "de", "target_lang": "en"}},
    }
    export_ctranslate2(state, folder, folder / "converted")
    return str(folder / "converted")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24, help="tokens of each hypothesis")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_memory()
    stock = build("stock", **SHAPE)
    sigma = build("ours", **SHAPE, reparam="sigma", reparam_gamma_init="spectral")
    contestants = {"stock": fairseq(stock, args.steps), "ours, folded sigmaReparam": fairseq(sigma, args.steps)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            converted = convert(stock, Path(folder))
            for precision in ("float32", "int8"):
                name = f"CTranslate2 {precision}"
                contestants[name] = ctranslate2(converted, precision, args.steps, args.threads)
        except InputError as error:
            print(f"without CTranslate2: {error}")
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    found = {}
    for round_ in range(args.rounds + 1):
        for name in list(contestants)[:: 1 if round_ % 2 else -1]:
            start = time.perf_counter()
            found[name] = contestants[name]()
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - start)
    print(f"{SENTENCES} sentences, beam {BEAM}, {args.steps} tokens, 6L-6L 512/2048/8, {args.threads} threads")
    for name, values in seconds.items():
        same = sum(map(list.__eq__, found[name], found["stock"]))
        rate = SENTENCES / statistics.median(values)
        print(f"{name:30} {rate:8.2f} sentences a second, {same} of {SENTENCES} translations as stock")
    print(report(seconds, [(name, "stock") for name in contestants if name != "stock"]))


if __name__ == "__main__":
    main()
