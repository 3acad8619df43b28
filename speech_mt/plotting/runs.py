"""A training run as TensorBoard recorded it: its scalars, and its quantities per layer."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator, ScalarEvent
from tensorboard.backend.event_processing.io_wrapper import IsSummaryEventsFile

from speech_mt.errors import InputError

TRAIN_SPLITS = ("train_inner", "train")  # fairseq: at each log interval, and at the end of each epoch
COLLAPSE_CARDS = "collapse/text_summary"  # as the monitor's detector writes them
_LAYER_TAG = re.compile(r"(.+)/(\d+)")


class Series(NamedTuple):
    """Numbers over training: ``values`` (N,) or (N, L), logged at ``steps`` (N,), in updates, ascending."""

    steps: np.ndarray
    values: np.ndarray


class Warned(NamedTuple):
    """A warning that the training gave: a collapse that began, which failure it is, and the evidence."""

    update: int
    failure: str
    text: str


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        label: its name in figures.
        folder: the fairseq ``--tensorboard-logdir``.
        splits: split (``train_inner``, ``train``, or a validation subset) to tag to series.
        warnings: what the collapse detector said, in the order of updates.
    """

    label: str
    folder: Path
    splits: dict[str, dict[str, Series]]
    warnings: tuple[Warned, ...] = ()

    @property
    def valid_splits(self) -> list[str]:
        """Names of the validation subsets."""
        return sorted(set(self.splits) - set(TRAIN_SPLITS))

    @property
    def last_update(self) -> int:
        """The last update at which anything was logged."""
        return max(int(series.steps[-1]) for tags in self.splits.values() for series in tags.values())

    @property
    def quantities(self) -> list[str]:
        """What was logged per layer in training, such as ``entropy_normalised/encoder``."""
        tags = (tag for split in TRAIN_SPLITS for tag in self.splits.get(split, {}))
        return sorted({match[1] for tag in tags if (match := _LAYER_TAG.fullmatch(tag))})

    def scalar(self, tag: str, split: str | None = None) -> Series:
        """A scalar over training, such as ``loss``; (0,) arrays where it was never logged.

        Args:
            tag: its name.
            split: where it was logged; by default every log interval, or else every epoch of training.
        """
        for name in TRAIN_SPLITS if split is None else (split,):
            if tag in self.splits.get(name, {}):
                return self.splits[name][tag]
        return Series(np.empty(0, int), np.empty(0))

    def layer_series(self, quantity: str) -> dict[int, Series]:
        """Layer number to its series: only the updates at which this layer was measured."""
        tags = {tag for split in TRAIN_SPLITS for tag in self.splits.get(split, {})}
        matches = [match for tag in tags if (match := _LAYER_TAG.fullmatch(tag)) and match[1] == quantity]
        return {int(match[2]): self.scalar(match[0]) for match in sorted(matches, key=lambda m: int(m[2]))}

    def layers(self, quantity: str) -> Series:
        """A quantity of all layers: steps (N,), values (N, L); NaN where a layer was not measured."""
        series = self.layer_series(quantity)
        if not series:
            return Series(np.empty(0, int), np.empty((0, 0)))
        steps = np.unique(np.concatenate([layer.steps for layer in series.values()]))
        values = np.full((len(steps), max(series) + 1), np.nan)
        for number, layer in series.items():
            values[np.searchsorted(steps, layer.steps), number] = layer.values
        return Series(steps, values)


def find_runs(logdir: str | Path) -> list[Path]:
    """The run folders in ``logdir``, itself or below: those whose train_inner or train holds event files.

    Raises:
        InputError: there is none.
    """
    logdir = Path(logdir)
    if not logdir.is_dir():
        raise InputError(f"{logdir}: no such folder; give the --tensorboard-logdir of fairseq-train")
    events = [Path(folder) for folder, _, files in os.walk(logdir) if any(map(IsSummaryEventsFile, files))]
    runs = sorted({folder.parent for folder in events if folder.name in TRAIN_SPLITS and folder != logdir})
    if not runs:
        found = f"event files only in {events[0]}" if events else "no event files"
        raise InputError(
            f"{logdir}: {found}; expected a folder with train_inner or train, as fairseq-train "
            "--tensorboard-logdir writes once the first log interval has passed"
        )
    return runs


def load_run(path: str | Path, label: str | None = None) -> Run:
    """Read a run's event files. Where a resumed run repeats updates, the later values stand.

    Args:
        path: a fairseq ``--tensorboard-logdir``, or a folder that holds one somewhere below.
        label: the run's name in figures; by default the folder's.

    Raises:
        InputError: no run, several runs or no scalar is there.
    """
    folders = find_runs(path)
    if len(folders) > 1:
        raise InputError(f"{path}: {len(folders)} runs, give one of: {', '.join(map(str, folders))}")
    folder = folders[0]
    events = {child.name: _read_events(child) for child in sorted(folder.iterdir()) if child.is_dir()}
    splits = {name: tags for name, read in events.items() if (tags := _scalars(read))}
    if not splits:
        raise InputError(f"{folder}: its event files hold no scalars yet; wait for the first log interval")
    return Run(label or default_labels([folder])[0], folder, splits, _warnings(events.get(TRAIN_SPLITS[0])))


def default_labels(folders: Sequence[Path]) -> list[str]:
    """Short names that tell runs apart: their paths without the parts that all have in common.

    ``exp/stock/tb`` and ``exp/sigma/tb`` become ``stock`` and ``sigma``; one alone becomes ``stock/tb``.
    """
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) == 1:
        return ["/".join(path[-2:]) for path in parts]
    start = len(os.path.commonprefix(parts))
    rest = [path[start:] for path in parts]
    end = len(os.path.commonprefix([path[::-1] for path in rest]))
    return ["/".join(path[: len(path) - end]) or folder.name for path, folder in zip(rest, folders, strict=True)]


def _read_events(folder: Path) -> EventAccumulator | None:
    """All event files directly in the folder."""
    if not any(IsSummaryEventsFile(path.name) for path in folder.iterdir()):
        return None
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # a truncated last record is no news
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0, "histograms": 1})  # 0: keep all
    events.Reload()
    return events


def _scalars(events: EventAccumulator | None) -> dict[str, Series]:
    """Tag to series."""
    return {} if events is None else {tag: _series(events.Scalars(tag)) for tag in events.Tags()["scalars"]}


def _warnings(events: EventAccumulator | None) -> tuple[Warned, ...]:
    if events is None or COLLAPSE_CARDS not in events.Tags()["tensors"]:
        return ()
    cards = [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(COLLAPSE_CARDS)]
    warnings = {Warned(step, *card.removeprefix("**").split("**, ", 1)) for step, card in cards}
    return tuple(sorted(warnings))


def _series(events: Iterable[ScalarEvent]) -> Series:
    """Events in the order of writing; one that goes back to an earlier update replaces all from there on."""
    kept: list[ScalarEvent] = []
    for event in sorted(events, key=lambda event: event.wall_time):
        while kept and kept[-1].step >= event.step:
            kept.pop()
        kept.append(event)
    return Series(np.array([event.step for event in kept]), np.array([event.value for event in kept]))
