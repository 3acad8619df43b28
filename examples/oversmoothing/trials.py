"""What the study trains, on what it is tested, and the rows of its tables."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from controls import CONTROLS

from speech_mt.errors import InputError

DEPTHS, DEPTH_OF_SHARES = (6, 12, 24), 12
SHARES = (0.1, 0.25, 0.5)

_TRAIN = (
    "--user-dir user_dir --cpu --num-workers 0 --log-format simple --log-interval 10 --monitor entropy,smoothing "
    "--monitor-interval 10 --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --disable-validation --no-save"
)


@dataclass(frozen=True)
class Task:
    """A corpus, a model and a score in percent.

    Attributes:
        corruptions: kind -> levels that the test set is spoilt with, in the order in which they are drawn.
    """

    title: str
    score: str
    more_is_better: bool
    updates: int
    options: str
    corruptions: dict[str, tuple[float, ...]]


TASKS = {
    "numbers": Task(
        "German to English number words, L-L layers of width 64",
        "BLEU",
        True,
        400,
        "--task translation --arch spectral_transformer_tiny --encoder-layers {layers} --decoder-layers {layers} "
        "--share-all-embeddings --dropout 0 --criterion label_smoothed_cross_entropy_with_entropy "
        "--label-smoothing 0.1 --lr 2e-3 --lr-scheduler inverse_sqrt --warmup-updates 100 --max-tokens 1600",
        {"characters": (0.01, 0.02, 0.05, 0.1)},
    ),
    "digits": Task(
        "spoken digits (FSDD), a CTC encoder of L layers of width 96",
        "WER",
        False,
        1500,
        "--task speech_manifest --arch spectral_ctc_transformer --encoder-layers {layers} --encoder-embed-dim 96 "
        "--encoder-ffn-embed-dim 384 --encoder-attention-heads 4 --conv-kernel-sizes 5,5 --conv-strides 3,1 "
        "--conv-channels 192 --no-scale-embedding --dropout 0.1 "
        "--criterion ctc_with_entropy --zero-infinity --lr 1e-3 --lr-scheduler inverse_sqrt --warmup-updates 100 "
        "--batch-size 32",
        {
            "noise": (20, 10, 5, 0),
            "lowpass": (3000, 2000, 1000),
            "clipping": (0.5, 0.2, 0.1),
            "speed": (0.8, 0.9, 1.1, 1.25),
            "reverberation": (0.1, 0.3, 0.6),
        },
    ),
    "images": Task(
        "handwritten digits (scikit-learn), a ViT-Ti of L layers",
        "accuracy",
        True,
        300,
        "",
        {"pixels": (0.25, 0.5, 1.0, 2.0)},
    ),
}


@dataclass(frozen=True)
class Trial:
    """One training."""

    task: str
    control: str
    layers: int
    share: float  # of the training set
    seed: int
    updates: int

    @property
    def name(self) -> str:
        """A folder name."""
        text = f"{self.task} {self.layers}L {self.control} {self.share:g} seed {self.seed} {self.updates}"
        return re.sub(r"[^\w.-]+", "_", text)

    def spoilt(self, corruption: str, level: float) -> Spoilt:
        """The row of its model on a spoilt test set."""
        return Spoilt(**vars(self), corruption=corruption, level=float(level))

    def command(self, data: str, folder: str) -> list[str]:
        """The fairseq-train command, to be run in the repository's root (images have none: see images.py)."""
        options = TASKS[self.task].options.format(layers=self.layers)
        return shlex.split(
            f"fairseq-train {shlex.quote(data)} {options} {CONTROLS[self.control].options} {_TRAIN} "
            f"--max-update {self.updates} --seed {self.seed} --save-dir {shlex.quote(folder)}"
        )


@dataclass(frozen=True)
class Result:
    """What came of a trial; NaN after a divergence."""

    score: float  # percent, clean test set
    loss: float  # training, mean of the last 10 updates; bits, or nats for images
    cosine: float  # of two tokens of the last encoder layer
    hfc_lfc: float  # of the same, over sqrt(n - 1)
    updates_a_second: float  # beside whatever else ran: see benchmarks/oversmoothing_cost.py for ratios
    commit: str
    machine: str
    command: str


@dataclass(frozen=True)
class Spoilt:
    """A trained model and a spoilt test set."""

    task: str
    control: str
    layers: int
    share: float
    seed: int
    updates: int
    corruption: str
    level: float


@dataclass(frozen=True)
class Score:
    """Percent."""

    score: float


@dataclass(frozen=True)
class Layer:
    """A measure of a layer at an update; in the file layers.csv of a run."""

    update: int
    measure: str
    stack: str
    layer: int


@dataclass(frozen=True)
class Value:
    value: float


def grid(
    tasks: Sequence[str],
    controls: Sequence[str],
    depths: Sequence[int],
    shares: Sequence[float],
    seed: int,
    updates: int,
) -> Iterator[Trial]:
    """Depths on all of the data first, then shares of it at one depth; all controls of a cell after each other.

    Args:
        updates: of every run; 0: the task's own.
    """
    cells = [(layers, 1.0) for layers in depths] + [(DEPTH_OF_SHARES, share) for share in shares]
    for layers, share in cells:
        for task in tasks:
            for control in controls:
                yield Trial(task, control, layers, share, seed, updates or TASKS[task].updates)


def known(controls: Sequence[str]) -> list[str]:
    """The controls.

    Raises:
        InputError: names that are none.
    """
    if unknown := [control for control in controls if control not in CONTROLS]:
        raise InputError(f"no control {', '.join(unknown)}; there are {', '.join(CONTROLS)}")
    return list(controls)
