"""Every layer of a fairseq Transformer checkpoint in numbers, and the layers to worry about.

    python scripts/inspect_checkpoint.py checkpoints/checkpoint_best.pt --out layers.png
    python scripts/inspect_checkpoint.py checkpoints/checkpoint_best.pt --data data-bin --batches 8

Ours or stock, folded or not. The first form reads the weights alone. With --data the model is built by its task and run
on a few batches in evaluation mode, on the CPU: it adds attention entropy, largest logits, and how alike tokens are.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from speech_mt.checkpoint import load_checkpoint
from speech_mt.data.stage import atomic_path
from speech_mt.diagnostics import worries
from speech_mt.diagnostics.inspection import LayerNumbers, add_data, inspect_weights, model_options
from speech_mt.diagnostics.monitor import Measured, Monitor
from speech_mt.diagnostics.sites import KINDS
from speech_mt.errors import InputError, run

USER_DIR = Path(__file__).resolve().parents[1] / "user_dir"
FORMATS = (".png", ".svg", ".pdf")
SEED = 1
LEGEND = """
a weight's name: its spectral norm, of W_hat under a reparametrisation. gamma: least and largest of the layer.
qk norm, rank, energy: of W_Q W_K^T per head: the largest spectral norm (@head), the lowest effective rank, the largest
  share of sum sigma^2 in the top 4 singular values. logit: standard deviation of logits between unrelated tokens of
  unit variance, largest head.
Re > 0, Re min, Re max: share of the eigenvalues of H = W_V W_O with a positive real part, and the extreme real parts;
  |l|: largest modulus. cond: log10 of H's condition number. asym: 0 if H is symmetric, 1 if antisymmetric.
"""
DATA_LEGEND = """
entropy: of attention, over log(visible keys): mean of the heads, and the lowest (@head); 1 is uniform.
logit: largest of all (@head). cosine: between tokens of a sentence, 1 if all are alike. hfc/lfc, residual: 0 if so.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("--out", type=Path, help=f"a figure of all layers: {', '.join(FORMATS)}")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    data = parser.add_argument_group("on data")
    data.add_argument("--data", help="what the task takes as its data, such as the folder of fairseq-preprocess")
    data.add_argument("--task", help="task to read it with (default: the checkpoint's own)")
    data.add_argument("--split", default="valid", help="(default: valid)")
    data.add_argument("--batches", type=int, default=4, metavar="N", help="drawn at random (default: 4)")
    data.add_argument("--batch-size", type=int, default=16, metavar="N", help="sentences of a batch (default: 16)")
    data.add_argument("--user-dir", type=Path, default=USER_DIR, help="the plugin that knows the model")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)  # before fairseq does
    if args.out and args.out.suffix not in FORMATS:
        raise InputError(f"--out {args.out}: unknown picture format; name it {', '.join(FORMATS)}")
    if min(args.batches, args.batch_size) < 1:
        raise InputError(f"--batches {args.batches} --batch-size {args.batch_size}: both have to be at least 1")
    if args.task and not args.data:
        raise InputError(f"--task {args.task}: only of use with --data")
    if args.data and not Path(args.data.partition(":")[0]).exists():
        raise InputError(f"--data {args.data}: no such file or folder")
    if not args.user_dir.is_dir():
        raise InputError(f"--user-dir {args.user_dir}: no such folder")

    state = load_checkpoint(args.checkpoint)
    options = model_options(state)
    try:
        rows = inspect_weights(state["model"], options)
    except InputError as error:
        raise InputError(f"{args.checkpoint}: {error}") from None
    del state
    if args.data:
        add_data(rows, measure(args))
    found = worries.find_worries(rows)
    name = options.get("_name") or options.get("arch") or "model"
    if args.json:
        print_json({"checkpoint": str(args.checkpoint), "model": name}, rows, found)
    else:
        print_tables(rows)
        print_worries(found, bool(args.data))
    if args.out:
        from speech_mt.plotting.checkpoint_figure import make_checkpoint_figure

        with atomic_path(args.out) as temporary:
            figure = make_checkpoint_figure(rows, found, f"{args.checkpoint.name}, {name}")
            figure.savefig(temporary, format=args.out.suffix[1:], dpi=105)
        if not args.json:
            print(args.out)


# -- running the model ----------------------------------------------------------------------------------------------


def measure(args: Namespace) -> Measured:
    """Build the model and its task with fairseq, and watch it on some batches.

    Raises:
        InputError: the task cannot read the data, or the model is not as the checkpoint says.
    """
    from speech_mt import compat

    compat.apply()
    from fairseq import checkpoint_utils, tasks, utils

    utils.import_user_module(args)
    overrides = {"data": args.data, "eval_bleu": False, "eval_wer": False}
    state = checkpoint_utils.load_checkpoint_to_cpu(str(args.checkpoint), overrides)
    task_cfg = state["cfg"]["task"]
    if args.task and args.task not in tasks.TASK_REGISTRY:
        raise InputError(f"--task {args.task}: no such task; there are {', '.join(sorted(tasks.TASK_REGISTRY))}")
    if args.task:
        setattr(task_cfg, "task" if isinstance(task_cfg, Namespace) else "_name", args.task)
    try:
        task = tasks.setup_task(task_cfg, from_checkpoint=True)
        task.load_dataset(args.split)
    except InputError:
        raise
    except Exception as error:  # tasks raise anything
        why = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"--data {args.data} --split {args.split}: the task cannot read it: {why}") from error
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(args.checkpoint)], task=task, state=state)
    model.eval()
    dataset = task.dataset(args.split)
    batches = task.get_batch_iterator(
        dataset,
        max_sentences=args.batch_size,
        max_positions=utils.resolve_max_positions(task.max_positions(), model.max_positions()),
        ignore_invalid_inputs=True,
        seed=SEED,
    ).next_epoch_itr(shuffle=True)
    padding = task.target_dictionary.pad()
    monitor, seen = Monitor(("entropy", "logits", "smoothing")), []
    with torch.no_grad():
        for _, sample in zip(range(args.batches), batches, strict=False):
            target = sample["net_input"].get("prev_output_tokens")
            with monitor.watch(model, None if target is None else target.eq(padding)):
                model(**sample["net_input"])
            seen.append(monitor.statistics())
    measured = monitor.reduce(seen)
    if measured is None:
        raise InputError(f"--data {args.data} --split {args.split}: no attention was seen in {len(seen)} batches")
    return measured


# -- printing ---------------------------------------------------------------------------------------------------------

Column = tuple[str, Callable[[LayerNumbers], str]]


def print_tables(rows: Sequence[LayerNumbers]) -> None:
    """A table a kind, of the weights; and another of what was seen on data."""
    for kind in KINDS:
        of_kind = [row for row in rows if row.kind == kind]
        if of_kind:
            names = dict.fromkeys(name for row in of_kind for name in row.spectral_norms)
            print_table(f"{kind}: weights", of_kind, [*map(_norm, names), *WEIGHT_COLUMNS])
    print(LEGEND)
    if not any("query_key_norm" in row.per_head for row in rows):
        print("No attention was measured: the checkpoint's options do not say how many heads there are.\n")
    if any("max_logit" in row.per_head for row in rows):
        for kind in KINDS:
            print_table(f"{kind}: on data", [row for row in rows if row.kind == kind], DATA_COLUMNS)
        print(DATA_LEGEND)


def print_table(title: str, rows: Sequence[LayerNumbers], columns: Sequence[Column]) -> None:
    """A row a layer; a column that would be empty is left out."""
    cells = [[name, *(show(row) for row in rows)] for name, show in columns]
    cells = [column for column in cells if any(column[1:])]
    if not cells:
        return
    print(f"\n{title}")
    for line in zip(["layer", *(str(row.layer) for row in rows)], *cells, strict=True):
        widths = [5, *(max(map(len, column)) for column in cells)]
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def _show(value: float | None) -> str:
    return "" if value is None else f"{value:#.3g}"


def _norm(name: str) -> Column:
    return name, lambda row: _show(row.spectral_norms.get(name))


def _gammas(row: LayerNumbers) -> str:
    return f"{min(row.gammas.values()):#.2g}..{max(row.gammas.values()):#.2g}" if row.gammas else ""


def _number(title: str, name: str) -> Column:
    return title, lambda row: _show(row.numbers.get(name))


def _of_heads(title: str, name: str, pick: Callable = max, mark: bool = False) -> Column:
    def show(row: LayerNumbers) -> str:
        values = row.per_head.get(name, [])
        if not values:
            return ""
        value = pick(values)
        return _show(value) + (f"@{values.index(value)}" if mark else "")

    return title, show


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


WEIGHT_COLUMNS: tuple[Column, ...] = (
    ("gamma", _gammas),
    _of_heads("qk norm", "query_key_norm", mark=True),
    _of_heads("rank", "effective_rank", min),
    _of_heads("energy", "energy_concentration"),
    _of_heads("logit", "typical_logit"),
    _number("Re > 0", "positive_share"),
    _number("Re min", "lowest_real"),
    _number("Re max", "highest_real"),
    _number("|l|", "largest_modulus"),
    ("cond", lambda row: _show(_log10(row.numbers.get("condition_number")))),
    _number("asym", "asymmetry"),
)
DATA_COLUMNS: tuple[Column, ...] = (
    _of_heads("entropy", "entropy_normalised", _mean),
    _of_heads("lowest", "entropy_normalised", min, mark=True),
    _of_heads("logit", "max_logit", mark=True),
    _number("cosine", "cosine"),
    _number("hfc/lfc", "hfc_lfc"),
    _number("residual", "rank_residual"),
)


def _log10(value: float | None) -> float | None:
    return None if value is None else math.log10(value)


def print_worries(found: Sequence[worries.Worry], with_data: bool) -> None:
    """What stands out; or that nothing does, and by which measure."""
    if found:
        print("To worry about:")
        for worry in found:
            print(f"  {worry}")
        return
    told = [
        f"weights are finite, their norms within {worries.VANISHED:g} to {worries.OUTLIER:g} times the layers' median",
        f"no W_Q W_K^T is large, above {worries.OUTLIER:g} times the median, or {worries.LARGE:g} times at low rank",
    ]
    if with_data:
        told += [
            f"tokens differ: cosines below {worries.ALIKE:g}",
            f"attention chooses: entropies below {worries.UNIFORM:g} of log(keys)",
            f"logits below {worries.LARGE_LOGIT:g}",
        ]
    if not with_data:
        told.append("attention and tokens were not looked at: that takes --data")
    print("Nothing stands out:", *told, sep="\n  ")


def print_json(about: dict[str, str], rows: Sequence[LayerNumbers], found: Sequence[worries.Worry]) -> None:
    """Everything; NaN and Inf, which JSON does not know, as null."""
    report = about | {"layers": [asdict(row) for row in rows], "worries": [worry._asdict() for worry in found]}
    print(json.dumps(_finite(report), indent=1))


def _finite(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


if __name__ == "__main__":
    run(main)
