"""Which learning rates train a speech recogniser, with warm-up and without, by Adam, Adagrad, LARS and plain SGD?

A grid of short trainings on spoken digits (examples/digits): post-LN, pre-LN and post-LN + sigmaReparam. Every run is a
fairseq-train; its row has the word error rate of 300 clips held out from training. What is in OUT/robustness.csv is not
run again, and a row is added after each run. With --report nothing is trained: RESULTS.md, its figure and a copy of
the table are written from the rows there are.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from speech_mt.errors import InputError, run
from speech_mt.experiments.commands import Progress, run_command
from speech_mt.experiments.pool import run_missing
from speech_mt.experiments.provenance import alone_in, commit, machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
METHODS = {
    "post-LN": "--norm-placement post",
    "pre-LN": "--norm-placement pre",
    "post-LN + sigmaReparam": "--norm-placement post --reparam sigma",
}
OPTIMIZERS = {
    "Adam": "--optimizer adam --adam-betas '(0.9, 0.98)'",
    "LARS": "--optimizer lars --momentum 0.9 --trust-coefficient 0.001",
    "SGD": "--optimizer sgd",
    "Adagrad": "--optimizer adagrad",
}
LEARNING_RATES = {  # the middle ones first: a study that is cut short has them for all
    "Adam": (2e-3, 8e-3, 5e-4, 3.2e-2),
    "LARS": (2.0, 8.0, 0.5, 32.0),
    "SGD": (0.4, 1.6, 0.1, 6.4),
    "Adagrad": (0.03, 0.1, 0.01, 0.3),
}
WARMUPS = (150, 0)
DIVERGED, STALLED, SOLVED = "diverged", "stalled", "solved"
LEARNS_BELOW, SOLVED_BELOW = 80.0, 10.0  # WER in percent; one word for every clip makes 90


@dataclass(frozen=True)
class Trial:
    """One cell of the grid."""

    method: str
    optimizer: str
    lr: float
    warmup: int  # updates, linear; then, or from the first update on, the learning rate falls linearly to 0
    seed: int
    updates: int

    @property
    def name(self) -> str:
        """A folder name."""
        text = f"{self.optimizer} {self.method} lr {self.lr:g} warm-up {self.warmup} seed {self.seed} {self.updates}"
        return re.sub(r"[^\w.-]+", "_", text)

    def command(self, data: str, folder: str) -> list[str]:
        """The fairseq-train command, to be run in the repository's root."""
        return shlex.split(
            f"fairseq-train {shlex.quote(data)} --user-dir user_dir --cpu --task speech_manifest --num-workers 0 "
            "--train-subset tuning --valid-subset valid --arch spectral_ctc_transformer --encoder-layers 12 "
            "--encoder-embed-dim 64 --encoder-ffn-embed-dim 256 --encoder-attention-heads 4 --conv-kernel-sizes 5,5 "
            f"--conv-strides 3,1 --conv-channels 128 --no-scale-embedding {METHODS[self.method]} --dropout 0 "
            "--criterion ctc_with_entropy --zero-infinity --monitor entropy,logits --clip-norm 1.0 "
            f"{OPTIMIZERS[self.optimizer]} --lr {self.lr:g} --lr-scheduler polynomial_decay --warmup-updates "
            f"{self.warmup} --total-num-update {self.updates} --max-update {self.updates} --batch-size 24 "
            f"--batch-size-valid 100 --validate-interval 1000 --seed {self.seed} --no-save --log-format json "
            f"--log-interval 20 --save-dir {shlex.quote(folder)} --tensorboard-logdir {shlex.quote(folder)}/tensorboard"
        )


@dataclass(frozen=True)
class Result:
    """What came of a trial; NaN where there is nothing to measure."""

    outcome: str  # diverged: not finite; stalled: WER of 80 % or more; solved: below 10 %; else learning
    wer: float  # percent, greedy, 300 held-out clips, after the last update
    loss: float  # bits a letter, training, mean of the last 20 updates
    entropy: float  # lowest of any layer's attention over log(keys), mean of the last 20 updates
    max_logit: float  # largest of any attention, mean over the last 20 updates
    minutes: float  # of updates, one core
    commit: str
    machine: str
    command: str


Results = dict[Trial, Result]


def outcome(wer: float) -> str:
    """The name of a finished run's error rate."""
    if math.isnan(wer):
        return DIVERGED
    return STALLED if wer >= LEARNS_BELOW else SOLVED if wer < SOLVED_BELOW else "learning"


def entries(log: str, tag: str) -> list[dict[str, float]]:
    """The statistics that fairseq-train logged under a tag with --log-format json."""
    found = re.findall(rf"{tag} \| (\{{.*\}})", log)
    return [{key: float(value) for key, value in json.loads(entry).items() if value is not None} for entry in found]


def result_of(log: str, trained: bool, told: tuple[str, str], command: str) -> Result:
    """The row that a log tells; ``trained``: the command ended well."""
    training, validation = entries(log, "train_inner"), entries(log, "valid")
    last = training[-1] if training else {}

    def extreme(prefix: str, choose: type(min)) -> float:
        return choose((v for k, v in last.items() if k.startswith(f"{prefix}/")), default=math.nan)

    wer = validation[-1]["valid_wer"] if trained and validation else math.nan
    finite = trained and math.isfinite(last.get("loss", math.nan))
    return Result(
        outcome=outcome(wer if finite else math.nan),
        wer=wer,
        loss=last.get("loss", math.nan) if trained else math.nan,
        entropy=extreme("entropy_normalised", min),
        max_logit=extreme("max_logit", max),
        minutes=last.get("wall", 0.0) / 60,
        commit=told[0],
        machine=told[1],
        command=command,
    )


def train(trial: Trial, data: Path, out: Path, progress: Progress, told: tuple[str, str]) -> Result:
    """One row of the table.

    Raises:
        InputError: the command failed for another reason than gradients that are not finite.
    """
    folder = out / trial.name
    command = trial.command(os.path.relpath(data, ROOT), os.path.relpath(folder, ROOT))
    log = folder / "train.log"
    log.unlink(missing_ok=True)  # nothing of a run is kept but its row

    def updates_done(text: str) -> str:
        found = re.findall(r'"num_updates": "(\d+)"', text)
        return f"{found[-1] if found else 0}/{trial.updates}"

    try:
        run_command(folder, "train", command, root=ROOT, progress=progress, state=updates_done)
        trained = True
    except InputError:
        trained = False
        if "(--skip-nonfinite" not in log.read_text(errors="replace"):
            raise
    finally:
        (folder / "train.completed").unlink(missing_ok=True)
    return result_of(log.read_text(errors="replace"), trained, told, shlex.join(command))


def grid(
    methods: Sequence[str],
    optimizers: Sequence[str],
    warmups: Sequence[int],
    seeds: int,
    updates: int,
    lrs: Sequence[float] | None = None,
) -> Iterator[Trial]:
    """The chosen part of the grid, in the order in which it is to be run: rates of all before more rates of one."""
    for seed in range(1, seeds + 1):
        for place in range(max(map(len, LEARNING_RATES.values())) if lrs is None else len(lrs)):
            for optimizer in optimizers:
                rates = LEARNING_RATES[optimizer] if lrs is None else lrs
                for warmup in warmups:
                    for method in methods:
                        if place < len(rates):
                            yield Trial(method, optimizer, rates[place], warmup, seed, updates)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "robustness", help="table and curves")
    parser.add_argument("--data", type=Path, default=ROOT / "runs" / "digits" / "data", help="made if absent")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--warmups", nargs="+", type=int, default=WARMUPS, metavar="N")
    parser.add_argument("--lrs", nargs="+", type=float, metavar="LR", help="instead of each optimizer's own")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds 1 to N")
    parser.add_argument("--updates", type=int, default=1200)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="MINUTES", help="start none after")
    parser.add_argument("--report", action="store_true", help="write RESULTS.md and its figure from the table")
    parser.add_argument("--results", type=Path, default=HERE, help="folder for RESULTS.md and its figure")
    args = parser.parse_args()
    out = args.out.absolute()
    table = out / "robustness.csv"
    if args.report:
        from robustness_report import write_report

        return write_report(table, args.results)
    progress, told = Progress(), (commit(ROOT), machine())
    with alone_in(out):
        data = args.data.absolute()
        prepare = [sys.executable, str(ROOT / "examples/digits/prepare.py"), "--out", str(data), "--corpora", "fsdd"]
        run_command(data, "prepare-fsdd", prepare, root=ROOT, progress=progress)

        def work(trial: Trial) -> Result:
            return train(trial, data / "fsdd", out, progress, told)

        def tell(trial: Trial, result: Result) -> str:
            return f"{trial.name}: {result.outcome}, WER {result.wer:.1f}, {result.minutes:.1f} minutes"

        trials = grid(args.methods, args.optimizers, args.warmups, args.seeds, args.updates, args.lrs)
        kinds = Trial, Result
        return 1 if run_missing(table, trials, kinds, work, tell, progress, args.jobs, args.budget) else 0


if __name__ == "__main__":
    run(main)
