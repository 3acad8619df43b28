"""Turn a checkpoint into a model of CTranslate2, and check that it translates as fairseq does.

    python scripts/export_ctranslate2.py checkpoints/checkpoint_best.pt deployed --data data/bin
    python scripts/export_ctranslate2.py checkpoints/checkpoint_best.pt small --data data/bin --quantization int8

For post-LN, pre-LN, DeepNorm and Admin with any --reparam, and for fairseq's own transformer. Decode with

    ctranslate2.Translator("deployed").translate_batch([["▁two", "▁pieces"]], beam_size=5, max_decoding_length=200)

The check decodes some sentences of --subset by both. Greedy search in float32 has to give the same text: exit code 1 if
it does not, unless two words were equally probable. Quantisation and beam search may differ, and where is reported.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from argparse import Namespace
from pathlib import Path

from speech_mt.arguments import non_negative_int, positive_int
from speech_mt.checkpoint import load_checkpoint
from speech_mt.checkpoint.ctranslate2_export import QUANTIZATIONS, export_ctranslate2, task_options
from speech_mt.errors import InputError, run

USER_DIR = Path(__file__).resolve().parents[1] / "user_dir"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to make")
    parser.add_argument("--data", type=Path, help="folder of fairseq-preprocess (default: the checkpoint's own)")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="float32", help="of the weights")
    parser.add_argument("--force", action="store_true", help="replace OUT, if it is an earlier export")
    check = parser.add_argument_group("check")
    check.add_argument("--subset", default="valid", help="whose sentences are decoded (default: valid)")
    check.add_argument("--sentences", type=non_negative_int, default=50, metavar="N", help="0: no check (default: 50)")
    check.add_argument("--beam", type=positive_int, default=5, help="decode with this beam, too (default: 5)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)  # before fairseq does
    state = load_checkpoint(args.checkpoint)
    args.data = args.data or Path(str(task_options(state).get("data")).partition(":")[0])
    if not args.data.is_dir():
        raise InputError(f"--data {args.data}: no such folder")
    load_plugin()
    subset = args.subset if args.sentences else None
    export_ctranslate2(state, args.data, args.out, args.quantization, args.force, subset)
    megabytes = sum(path.stat().st_size for path in args.out.iterdir()) / 1e6
    print(f"{args.out}: {args.quantization}, {megabytes:.1f} MB")
    return check_translations(args) if args.sentences else 0


def load_plugin() -> None:
    """Import fairseq and register the plugin's models."""
    from speech_mt import compat

    warnings.filterwarnings("ignore", "`torch.jit.script", FutureWarning)  # fairseq uses it as it is imported
    compat.apply()
    from fairseq.utils import import_user_module

    import_user_module(Namespace(user_dir=str(USER_DIR)))


def check_translations(args: Namespace) -> int:
    """Print how many translations are equal, and those that are not; the exit code."""
    import ctranslate2
    from fairseq import checkpoint_utils

    from speech_mt.decoding.agreement import TIE, compare_decoders

    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(args.checkpoint)], arg_overrides={"data": str(args.data), "eval_bleu": False}
    )
    task.load_dataset(args.subset)
    dataset = task.dataset(args.subset)
    sources = [dataset[i]["source"] for i in range(min(args.sentences, len(dataset)))]
    model = models[0].eval()
    model.make_generation_fast_()
    translator = ctranslate2.Translator(str(args.out), intra_threads=1)
    wrong = 0
    for beam in dict.fromkeys((1, args.beam)):
        found = compare_decoders(model, task.target_dictionary, translator, sources, task.source_dictionary, beam=beam)
        name = "greedy search" if beam == 1 else f"beam {beam}"
        print(f"{name}: {len(sources) - len(found)} of {len(sources)} translations equal fairseq's")
        for one in found:
            tie = abs(one.margin) < TIE
            wrong += beam == 1 and not tie and args.quantization == "float32"
            print(
                f"  {args.subset} {one.sentence}, token {one.position}: ours is more probable by {one.margin:.4f} nats"
            )
            print(f"    fairseq      {' '.join(one.ours)}\n    CTranslate2  {' '.join(one.theirs)}")
    if wrong:
        print(f"error: {wrong} greedy translations differ by more than a tie: do not use {args.out}")
    return int(wrong > 0)


if __name__ == "__main__":
    run(main)
