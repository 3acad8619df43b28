"""Word error rates of small CTC recognisers on real speech: post-LN with and without sigmaReparam, several seeds.

Every run is a fairseq-train, a fairseq-generate and a count of word errors. What is in OUT/digits.csv is not run
again, an interrupted training goes on from its last checkpoint, and a row is added after each run. With --report
nothing is trained: RESULTS.md and a copy of the table are written from the rows there are.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError, run
from speech_mt.experiments.commands import Progress, run_command
from speech_mt.experiments.pool import run_missing
from speech_mt.experiments.provenance import alone_in, commit, machine
from speech_mt.experiments.table import read_table
from speech_mt.scoring.hypotheses import read_parallel
from speech_mt.scoring.wer import score_wer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
METHODS = {"post-LN": "--norm-placement post", "post-LN + sigmaReparam": "--norm-placement post --reparam sigma"}
MODEL = (
    "--arch spectral_ctc_transformer --encoder-layers 4 --encoder-embed-dim 96 --encoder-ffn-embed-dim 384 "
    "--encoder-attention-heads 4 --conv-kernel-sizes 5,5 --conv-strides 3,1 --conv-channels 192 --no-scale-embedding"
)
TASK = "--user-dir user_dir --cpu --task speech_manifest --num-workers 0"
TRAIN = (
    "--dropout 0.1 --specaugment librispeech_100h --criterion ctc_with_entropy --zero-infinity --monitor entropy "
    "--clip-norm 1.0 --log-format json --log-interval 50"
)


@dataclass(frozen=True)
class Corpus:
    """What differs between the corpora."""

    title: str
    updates: int
    options: str


CORPORA = {
    "fsdd": Corpus(
        "Free Spoken Digit Dataset: 300 test clips (takes 0 to 4), trained on the other 2,700",
        8000,
        "--batch-size 16 --lr 2e-3 --warmup-updates 200 --specaugment-start-update 600",
    ),
    "an4": Corpus(
        "AN4: 10 utterances of letters, numbers and commands, trained on 60 (1.9 minutes)",
        1500,
        "--batch-size 12 --lr 2e-3 --warmup-updates 150 --specaugment-start-update 300",
    ),
}


@dataclass(frozen=True)
class Trial:
    """One training."""

    corpus: str
    method: str
    seed: int
    updates: int

    @property
    def name(self) -> str:
        """A folder name."""
        return re.sub(r"[^\w.-]+", "_", f"{self.corpus} {self.method} {self.updates} seed {self.seed}")

    def train(self, data: str, folder: str) -> list[str]:
        """The fairseq-train command, to be run in the repository's root."""
        return shlex.split(
            f"fairseq-train {shlex.quote(data)} {TASK} {MODEL} {METHODS[self.method]} {TRAIN} "
            f"--optimizer adam --adam-betas '(0.9, 0.98)' {CORPORA[self.corpus].options} "
            f"--lr-scheduler polynomial_decay --total-num-update {self.updates} --max-update {self.updates} "
            f"--seed {self.seed} --disable-validation --no-epoch-checkpoints --save-interval-updates 500 "
            f"--keep-interval-updates 1 --save-dir {shlex.quote(folder)}/checkpoints "
            f"--tensorboard-logdir {shlex.quote(folder)}/tensorboard"
        )

    def generate(self, data: str, folder: str) -> list[str]:
        """The fairseq-generate command."""
        return shlex.split(
            f"fairseq-generate {shlex.quote(data)} {TASK} --gen-subset test --batch-size 50 "
            f"--path {shlex.quote(folder)}/checkpoints/checkpoint_last.pt --results-path {shlex.quote(folder)}/test"
        )


@dataclass(frozen=True)
class Result:
    """What came of a training."""

    wer: float  # percent, test set, greedy
    errors: int
    words: int
    loss: float  # bits a letter, training, mean of the last 50 updates
    entropy: float  # lowest of any layer's attention over log(keys), mean of the last 50 updates
    minutes: float  # of training, one core, beside whatever else the machine does
    commit: str
    machine: str
    command: str


Results = dict[Trial, Result]


def last_statistics(log: str) -> dict[str, float]:
    """Of the last log interval of a fairseq-train log with --log-format json."""
    entry = json.loads(re.findall(r"train_inner \| (\{.*\})", log)[-1])
    return {name: float(value) for name, value in entry.items() if value not in ("None", None)}


def train_and_score(trial: Trial, data: Path, out: Path, progress: Progress, told: tuple[str, str]) -> Result:
    """One row of the table."""
    folder = out / trial.name
    data_folder, run_folder = (os.path.relpath(path, ROOT) for path in (data / trial.corpus, folder))
    command = trial.train(data_folder, run_folder)

    def updates_done(log: str) -> str:
        found = re.findall(r'"num_updates": "(\d+)"', log)
        return f"{found[-1] if found else 0}/{trial.updates}"

    run_command(folder, "train", command, root=ROOT, progress=progress, state=updates_done)
    run_command(folder, "generate", trial.generate(data_folder, run_folder), root=ROOT, progress=progress)
    words = score_wer(read_parallel(str(folder / "test" / "generate-test.txt"))).words
    statistics = last_statistics((folder / "train.log").read_text())
    return Result(
        wer=words.rate,
        errors=words.errors,
        words=words.reference,
        loss=statistics["loss"],
        entropy=min(value for name, value in statistics.items() if name.startswith("entropy_normalised/")),
        minutes=statistics["wall"] / 60,
        commit=told[0],
        machine=told[1],
        command=shlex.join(command),
    )


def grid(corpora: list[str], methods: list[str], seeds: int, updates: int | None) -> Iterator[Trial]:
    """Seeds of all before more seeds of one, so that a study that is cut short compares like with like."""
    for corpus in corpora:
        for seed in range(1, seeds + 1):
            for method in methods:
                yield Trial(corpus, method, seed, updates or CORPORA[corpus].updates)


def report(results: Mapping[Trial, Result]) -> str:
    """The text of RESULTS.md: measured rows only."""
    commits = sorted({result.commit for result in results.values()})
    machines = sorted({result.machine for result in results.values()})
    parts = [
        "# Digits: results\n\nWritten by `python examples/digits/digits.py --report` from [digits.csv](digits.csv), "
        "which has the command, commit and numbers of each run. Greedy CTC decoding, no language model; the checkpoint "
        "is the last one, chosen by nothing. WER in percent of the test set's words; errors seed by seed.\n\n"
        f"Commit {', '.join(commits)}. {', '.join(machines)}, one core a run, beside other work."
    ]
    for corpus, description in CORPORA.items():
        chosen = {trial: result for trial, result in results.items() if trial.corpus == corpus}
        if chosen:
            parts.append(f"## {description.title}\n\n{_table(chosen)}")
    return "\n\n".join(parts) + "\n"


def _table(results: Mapping[Trial, Result]) -> str:
    lines = [
        "| | updates | seeds | WER, mean | lowest to highest | errors of words | minutes a run | lowest entropy |",
        "|---" * 8 + "|",
    ]
    for method in METHODS:
        for updates in sorted({trial.updates for trial in results}):
            runs = [r for t, r in results.items() if (t.method, t.updates) == (method, updates)]
            if not runs:
                continue
            rates = [r.wer for r in runs]
            errors = ", ".join(str(r.errors) for r in runs)
            minutes, entropy = mean(r.minutes for r in runs), min(r.entropy for r in runs)
            lines.append(
                f"| {method} | {updates} | {len(runs)} | {mean(rates):.2f} | {min(rates):.2f} to {max(rates):.2f} | "
                f"{errors} of {runs[0].words} | {minutes:.1f} | {entropy:.3f} |"
            )
    return "\n".join(lines)


def write_report(table: Path, folder: Path) -> int:
    """RESULTS.md and digits.csv in ``folder``.

    Raises:
        InputError: the table has no rows.
    """
    results = read_table(table, Trial, Result)
    if not results:
        raise InputError(f"{table}: no rows yet; run python examples/digits/digits.py first")
    with atomic_path(folder / "digits.csv") as temporary:
        shutil.copyfile(table, temporary)
    with atomic_path(folder / "RESULTS.md") as temporary:
        temporary.write_text(report(results), encoding="utf-8")
    print(f"{folder / 'RESULTS.md'}: {len(results)} runs")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "digits", help="data, runs and the table")
    parser.add_argument("--corpora", nargs="+", choices=list(CORPORA), default=list(CORPORA))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 1 to N")
    parser.add_argument("--updates", type=int, help="of every run, instead of the corpus's own number")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="MINUTES", help="start no run after these"
    )
    parser.add_argument("--report", action="store_true", help="write RESULTS.md from the table")
    parser.add_argument("--results", type=Path, default=HERE, help="folder for RESULTS.md")
    args = parser.parse_args()
    out = args.out.absolute()
    table = out / "digits.csv"
    if args.report:
        return write_report(table, args.results)
    progress, told = Progress(), (commit(ROOT), machine())
    with alone_in(out):
        prepare = [sys.executable, str(HERE / "prepare.py"), "--out", str(out / "data"), "--corpora", *args.corpora]
        run_command(out / "data", f"prepare-{'-'.join(args.corpora)}", prepare, root=ROOT, progress=progress)

        def work(trial: Trial) -> Result:
            return train_and_score(trial, out / "data", out, progress, told)

        def tell(trial: Trial, result: Result) -> str:
            return f"{trial.name}: WER {result.wer:.2f} ({result.errors} of {result.words} words)"

        trials = grid(args.corpora, args.methods, args.seeds, args.updates)
        kinds = Trial, Result
        return 1 if run_missing(table, trials, kinds, work, tell, progress, args.jobs, args.budget) else 0


if __name__ == "__main__":
    run(main)
