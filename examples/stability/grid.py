"""What the study trains, and its table: a row a run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from speech_mt.errors import InputError
from speech_mt.experiments.table import read_table, write_table

METHODS = {
    "post-LN": "--norm-placement post",
    "pre-LN": "--norm-placement pre",
    "DeepNorm": "--norm-placement deepnorm",
    "Admin": "--norm-placement admin",
    "post-LN + sigmaReparam": "--norm-placement post --reparam sigma",
    "no LN + sigmaReparam": "--norm-placement none --reparam sigma",
    "pre-LN + sigmaReparam": "--norm-placement pre --reparam sigma",
    "post-LN + spectral norm": "--norm-placement post --reparam spectral_norm",
    "post-LN + QK-norm": "--norm-placement post --qk-norm",
    "post-LN + softcap 50": "--norm-placement post --attention-softcap 50",
    "post-LN + QK-clip 100": "--norm-placement post --qk-clip 100",
}
DEPTHS = (18, 6, 50, 100)
LEARNING_RATES = (2e-3, 5e-4, 8e-3)
WARMUPS = (100, 0)
SURVIVORS_OF = {100: 50}  # a depth that only those who learn at another depth are tried at

# depths and warm-ups in order of interest, so that a study that is cut short has a useful table
_STAGES = (((18, 6), 100), ((18, 6), 0), ((50,), 100), ((50,), 0), ((100,), 100), ((100,), 0))


@dataclass(frozen=True)
class Trial:
    """One cell of the grid."""

    method: str
    depth: int  # layers of the encoder, and of the decoder
    lr: float
    warmup: int  # updates; 0: a constant learning rate, else inverse square root
    seed: int
    max_updates: int

    @property
    def name(self) -> str:
        """A folder name."""
        text = f"{self.depth}L {self.method} lr {self.lr:g} warm-up {self.warmup} seed {self.seed} {self.max_updates}"
        return re.sub(r"[^\w.-]+", "_", text)

    def command(self, data: str, folder: str) -> list[str]:
        """The fairseq-train command, to be run in the repository's root; logs to ``folder``."""
        schedule = (
            f"--lr-scheduler inverse_sqrt --warmup-updates {self.warmup}" if self.warmup else "--lr-scheduler fixed"
        )
        return shlex.split(
            f"fairseq-train {shlex.quote(data)} --user-dir user_dir --cpu --task translation "
            f"--arch spectral_transformer_tiny --encoder-layers {self.depth} --decoder-layers {self.depth} "
            f"--share-all-embeddings --dropout 0 {METHODS[self.method]} "
            "--criterion label_smoothed_cross_entropy_with_entropy --label-smoothing 0.1 --monitor entropy,smoothing "
            f"--optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --lr {self.lr:g} {schedule} "
            f"--max-tokens 1600 --max-update {self.max_updates} --seed {self.seed} --num-workers 0 "
            "--log-format simple --log-interval 10 --disable-validation --no-save "
            f"--save-dir {shlex.quote(folder)} --tensorboard-logdir {shlex.quote(folder)}"
        )


@dataclass(frozen=True)
class Result:
    """What came of a trial; NaN where there is nothing to measure, as after a divergence."""

    outcome: str  # see outcome.py
    updates: int  # at which it was decided, or ended
    loss: float  # bits a token, training, mean of the last 10 updates
    valid_loss: float
    bleu: float  # greedy, first 200 sentences of the test set
    entropy: float  # lowest of any layer's attention over log(visible keys), at the last measurement
    cosine_encoder: float  # between the tokens of the last layer, at the last measurement
    cosine_decoder: float
    max_logit: float  # largest attention logit, measured every 10 updates on 16 sentences, of all training
    seconds: float  # of training
    commit: str
    machine: str
    command: str


Results = dict[Trial, Result]


def grid(
    methods: Sequence[str],
    depths: Sequence[int],
    lrs: Sequence[float],
    warmups: Sequence[int],
    seed: int,
    max_updates: int,
) -> Iterator[Trial]:
    """The chosen part of the grid, in the order in which it is to be run."""
    stages = [*_STAGES, *(((depth,), warmup) for depth in depths if depth not in DEPTHS for warmup in warmups)]
    for stage_depths, warmup in stages:
        for lr in lrs:
            for depth in stage_depths:
                for method in methods:
                    if depth in depths and warmup in warmups:
                        yield Trial(method, depth, lr, warmup, seed, max_updates)


def is_wanted(trial: Trial, results: Mapping[Trial, Result]) -> bool:
    """False for the deepest models of a method that did not learn at the depth before, or was not tried there."""
    if trial.depth not in SURVIVORS_OF:
        return True
    before = results.get(replace(trial, depth=SURVIVORS_OF[trial.depth]))
    return before is not None and before.outcome in ("solved", "learning")


def longest(results: Mapping[Trial, Result]) -> Results:
    """One trial a cell and seed: that with the most updates allowed."""
    best: dict[Trial, Trial] = {}
    for trial in results:
        cell = replace(trial, max_updates=0)
        if cell not in best or best[cell].max_updates < trial.max_updates:
            best[cell] = trial
    return {trial: results[trial] for trial in best.values()}


def read_results(path: Path) -> Results:
    """The table; empty where there is no file."""
    return read_table(path, Trial, Result)


def write_results(path: Path, results: Mapping[Trial, Result]) -> None:
    """Write the table, whole or not at all."""
    write_table(path, results, Trial, Result)


def known(methods: Iterable[str]) -> list[str]:
    """The methods, checked.

    Raises:
        InputError: one is unknown.
    """
    methods = list(methods)
    if unknown := [method for method in methods if method not in METHODS]:
        raise InputError(f"--methods {unknown[0]}: not one of {', '.join(METHODS)}")
    return methods
