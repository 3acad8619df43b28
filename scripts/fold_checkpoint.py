"""Fold a checkpoint into plain weights, for stock fairseq where that is possible.

    python scripts/fold_checkpoint.py checkpoints/checkpoint_best.pt folded.pt
    fairseq-generate DATA --path folded.pt          # no --user-dir

sigmaReparam, spectral norm, weight norm and value spectra become plain weights; DeepNorm and Admin become plain
post-LN. What does not fold (QK-norm, softcap, Sub-LN, sandwich norm, no norm, token mixing, speech) is named, and only
the reparametrisation is removed.
"""

import argparse

from speech_mt.checkpoint import load_checkpoint, save_checkpoint
from speech_mt.checkpoint.folding import fold_checkpoint
from speech_mt.checkpoint.writing import check_output
from speech_mt.errors import run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("input", metavar="IN", help="a checkpoint of this plugin")
    parser.add_argument("output", metavar="OUT", help="where to write the folded one")
    args = parser.parse_args()
    check_output(args.output, [args.input])
    folded, reasons = fold_checkpoint(load_checkpoint(args.input))
    save_checkpoint(folded, args.output)
    if reasons:
        print(f"{args.output}: plain weights, but still a model of the plugin: {'; '.join(reasons)}")
        print("decode it with --user-dir user_dir")
    else:
        print(f"{args.output}: a stock fairseq transformer; decode it without --user-dir, with")
        print("--required-batch-size-multiple 1, or stock fairseq drops the last batch")


if __name__ == "__main__":
    run(main)
