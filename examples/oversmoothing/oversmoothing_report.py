"""RESULTS.md, its figures and copies of the tables, from the rows of the study."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

from controls import CONTROLS
from oversmoothing_figures import draw_by_layer, draw_over_training, draw_spoilt, most_run
from trials import DEPTH_OF_SHARES, TASKS, Layer, Result, Score, Spoilt, Trial, Value

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError
from speech_mt.experiments.table import read_table

COMMAND = "python examples/oversmoothing/oversmoothing.py"
NOT_RUN = "not run"
Results = Mapping[Trial, Result]


def write_report(out: Path, folder: Path) -> int:
    """Write RESULTS.md, the figures and the tables into ``folder``.

    Raises:
        InputError: there are no rows.
    """
    results = read_table(out / "study.csv", Trial, Result)
    if not results:
        raise InputError(f"{out / 'study.csv'}: no rows yet; run {COMMAND} first")
    spoilt = read_table(out / "spoilt.csv", Spoilt, Score)
    layers = {t: rows for t in results if (rows := read_table(out / t.name / "layers.csv", Layer, Value))}
    figures = {"spoilt.png": draw_spoilt(results, spoilt)}
    if layers:
        figures |= {"by_layer.png": draw_by_layer(layers), "over_training.png": draw_over_training(layers)}
    else:
        print(f"by_layer.png, over_training.png: left as they are, no run's folder in {out} has a layers.csv")
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        with atomic_path(folder / name) as temporary:
            figure.savefig(temporary, dpi=110, format="png")
    for name in ("study.csv", "spoilt.csv"):
        if (out / name).exists():
            with atomic_path(folder / name) as temporary:
                shutil.copyfile(out / name, temporary)
    with atomic_path(folder / "RESULTS.md") as temporary:
        temporary.write_text(report(results, spoilt), encoding="utf-8")
    print(f"{folder / 'RESULTS.md'}: {len(results)} runs")
    return 0


def report(results: Results, spoilt: Mapping[Spoilt, Score]) -> str:
    """The text of RESULTS.md."""
    parts = [_head(results)]
    for name, task in TASKS.items():
        of_task = {trial: result for trial, result in results.items() if trial.task == name}
        if of_task:
            better = "more" if task.more_is_better else "less"
            parts.append(f"## {task.title[0].upper()}{task.title[1:]}: {task.score} ({better} is better)")
            whole = {t: r for t, r in of_task.items() if t.share == 1}
            shares = {t: r for t, r in of_task.items() if t.layers == DEPTH_OF_SHARES}
            table = _table(whole, lambda t: t.layers, lambda x: f"{x}L")
            note = "All of the training data. In brackets: cosine between tokens of the last encoder layer."
            parts.append(f"{note}\n\n{table}")
            if len({trial.share for trial in shares}) > 1:
                text = _table(shares, lambda t: t.share, lambda x: f"{100 * x:g} %")
                parts.append(f"Shares of the training data, {DEPTH_OF_SHARES}L.\n\n{text}")
            if text := _spoilt(name, results, spoilt):
                parts.append(text)
    parts += [
        "## Spoilt test sets\n\nThe first point is the clean test set; of several seeds the mean.\n\n"
        "![Score by corruption and level](spoilt.png)",
        "## By layer, after training\n\nOf the deepest models, first seed. HFC/LFC is over sqrt(tokens - 1); dashed is "
        "that of the simplified model X + A X H with the layers' measured attention and weights, from the same input. "
        "The share of channels is of those whose dominating eigenvalue is that of the constant vector, so that they "
        "are to smooth. H is W_V W_O, with the gain of a LayerNorm in front.\n\n![Measures by layer](by_layer.png)",
        "## Over training\n\nOf the last encoder layer of the same models.\n\n![Over training](over_training.png)",
        f"## Not run\n\n{_not_run(results)}",
    ]
    return "\n\n".join(parts) + "\n"


def _head(results: Results) -> str:
    def some(values: object) -> str:
        return ", ".join(map(str, sorted(set(values))))

    seeds = some(t.seed for t in results)
    return f"""# Oversmoothing study: results

{len(results)} runs, seed {seeds}. Where a cell has several seeds it is their mean ± standard deviation; **elsewhere
the spread is not known**. Small models, minutes of training: differences say nothing of large ones.

Written by `{COMMAND} --report` from [study.csv](study.csv) and [spoilt.csv](spoilt.csv), which have the command, commit
and numbers of each run. Commit {some(r.commit for r in results.values())}; {some(r.machine for r in results.values())},
beside other work. Models are pre-LN but for DeepNorm."""


def _table(results: Results, column_of: Callable[[Trial], float], name: Callable[[float], str]) -> str:
    """Controls by columns: score, and in brackets the cosine between tokens of the last encoder layer."""
    columns = sorted({column_of(trial) for trial in results})
    rows = {
        control: [
            _cell([r for t, r in results.items() if (t.control, column_of(t)) == (control, column)])
            for column in columns
        ]
        for control in CONTROLS
    }
    return _rows([name(column) for column in columns], rows)


def _rows(columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """A table without the rows of which nothing was run."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows.items() if set(cells) != {NOT_RUN}]
    return "\n".join(lines)


def _cell(seeds: Sequence[Result]) -> str:
    finite = [result for result in seeds if math.isfinite(result.score)]
    if len(finite) < len(seeds):
        return "diverged" if len(seeds) == 1 else f"{len(seeds) - len(finite)} of {len(seeds)} diverged"
    text = _mean([result.score for result in seeds])
    cosines = [result.cosine for result in seeds if math.isfinite(result.cosine)]
    return text + (f" ({mean(cosines):.2f})" if cosines else "")


def _mean(scores: Sequence[float]) -> str:
    if not scores:
        return NOT_RUN
    return f"{mean(scores):.1f}" + (f" ± {stdev(scores):.1f}" if len(scores) > 1 else "")


def _spoilt(task: str, results: Results, spoilt: Mapping[Spoilt, Score]) -> str:
    """Controls by corruptions, the mean over the levels; "" if none was tested at all levels."""
    seeds = most_run(results, task)
    kinds = TASKS[task].corruptions

    def cell(trials: Sequence[Trial], kind: str) -> str:
        rows = [[spoilt.get(t.spoilt(kind, level)) for level in kinds[kind]] for t in trials]
        return _mean([mean(row.score for row in of_seed) for of_seed in rows if None not in of_seed])

    rows = {control: [cell(seeds[control], kind) for kind in kinds] for control in CONTROLS if control in seeds}
    if all(set(cells) == {NOT_RUN} for cells in rows.values()):
        return ""
    layers = next(iter(seeds.values()))[0].layers
    note = f"Test sets spoilt, {layers}L trained on all of the clean data; mean over the levels of a corruption."
    return f"{note}\n\n{_rows(list(kinds), rows)}"


def _not_run(results: Results) -> str:
    missing = [
        f"{name}: {', '.join(gone)}"
        for name in TASKS
        if (gone := [c for c in CONTROLS if not any((t.task, t.control) == (name, c) for t in results)])
    ]
    rest = "Other seeds, sizes and tasks, and GPUs. What a control costs: benchmarks/oversmoothing_cost.py."
    return "\n".join(f"- {line}" for line in missing) + ("\n\n" if missing else "") + rest
