"""Draw training runs side by side: loss, gradient norm, attention entropy and token similarity per layer.

    python scripts/plot_run.py checkpoints/tensorboard
    python scripts/plot_run.py stock/tb sigma/tb --labels "stock post-LN,sigmaReparam" --html report.html

LOGDIR is the --tensorboard-logdir of fairseq-train, or a folder with such folders below it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError, run
from speech_mt.plotting.figures import make_figure
from speech_mt.plotting.report import make_report
from speech_mt.plotting.runs import default_labels, find_runs, load_run

FORMATS = (".png", ".svg", ".pdf")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logdirs", nargs="+", type=Path, metavar="LOGDIR")
    parser.add_argument(
        "--labels", help="names of the runs, separated by commas; default: from their folders"
    )
    parser.add_argument("--out", type=Path, help=f"the figure: {', '.join(FORMATS)} (default: run.png)")
    parser.add_argument("--html", type=Path, help="also or instead, a page that opens offline")
    parser.add_argument("--title", help="above the figure and the page")
    args = parser.parse_args()
    if args.out is None and args.html is None:
        args.out = Path("run.png")
    if args.out and args.out.suffix not in FORMATS:
        raise InputError(f"--out {args.out}: unknown picture format; name it {', '.join(FORMATS)}")
    if args.out and args.html and args.out.resolve() == args.html.resolve():
        raise InputError(f"--out and --html are both {args.out}: the page would replace the figure: give two files")

    folders = list(dict.fromkeys(folder for logdir in args.logdirs for folder in find_runs(logdir)))
    labels = args.labels.split(",") if args.labels else default_labels(folders)
    if len(labels) != len(folders):
        raise InputError(
            f"--labels {args.labels}: {len(labels)} names for {len(folders)} runs: {', '.join(map(str, folders))}"
        )
    runs = [load_run(folder, label) for folder, label in zip(folders, labels, strict=True)]
    for each in runs:
        print(f"{each.label}: {each.folder}, {each.last_update} updates")
        if not each.quantities:
            print(f"{each.label}: nothing was logged per layer; a criterion *_with_entropy logs it")
    if args.out:
        with atomic_path(args.out) as temporary:
            make_figure(runs, args.title).savefig(temporary, format=args.out.suffix[1:], dpi=105)
        print(args.out)
    if args.html:
        with atomic_path(args.html) as temporary:
            temporary.write_text(make_report(runs, args.title or "Training runs"), encoding="utf-8")
        print(args.html)


if __name__ == "__main__":
    run(main)
