"""Trainings killed at random moments, and resumed, against the same trainings left alone.

    python -m tests.stress.kill_resume --kills 20 --seed 1

A killed run is started again with the same command until it ends. Then its losses, weights, gamma, u, v, optimizer,
learning rate, place in the data and detector have to be those of the run that was never killed, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speech_mt.checkpoint import load_checkpoint
from speech_mt.data.manifest import write_manifest
from tests.integration.commands import Commands, Running, Server
from tests.integration.conftest import PLUGIN, REPOSITORY, Done, write_corpus

COMMON = """--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 32 --encoder-attention-heads 2
    --reparam sigma --optimizer adam --lr 0.01 --clip-norm 1 --seed 7 --cpu --log-format json --log-interval 1
    --monitor-interval 4 --save-interval-updates 2 --keep-interval-updates 3 --no-epoch-checkpoints"""
TASKS = {
    "translation": f"""fairseq-train bin {PLUGIN} --arch spectral_transformer --decoder-layers 1 --max-epoch 4
        --criterion label_smoothed_cross_entropy_with_entropy --label-smoothing 0.1 --batch-size 6
        --lr-scheduler inverse_sqrt --warmup-updates 10 --patience 9 {COMMON}""",
    "speech": f"""fairseq-train speech {PLUGIN} --task speech_manifest --arch spectral_ctc_transformer_tiny
        --conv-channels 16 --criterion ctc_with_entropy --zero-infinity --specaugment lb --batch-size 3 --max-epoch 5
        --lr-scheduler reduce_lr_on_plateau --lr-patience 0 --lr-shrink 0.5 --lr-threshold 0.5 --num-workers 1
        {COMMON}""",
}
WRITING = "killed while writing"
OF_WRITING = 0.3  # share of kills that wait for a checkpoint that is being written


def write_data(folder: Path, commands: Commands) -> None:
    """A tiny parallel corpus, and cached features of noise."""
    write_corpus(folder)
    generator = np.random.default_rng(0)
    lengths = generator.integers(40, 70, 21)
    (folder / "speech").mkdir()
    np.save(folder / "speech" / "all.npy", generator.normal(size=(lengths.sum(), 80)).astype(np.float32))
    rows = [
        {"id": f"u{i}", "audio": "none.wav", "duration": n / 100, "text": ["one two", "two", "six one"][i % 3]}
        | {"speaker": "noise", "features": "all.npy", "offset": lengths[:i].sum(), "frames": n}
        for i, n in enumerate(lengths)
    ]
    write_manifest(folder / "speech" / "train.tsv", rows)
    write_manifest(folder / "speech" / "valid.tsv", rows[:5])
    for command in (
        "fairseq-preprocess -s de -t en --destdir bin --trainpref train --validpref valid --testpref test",
        f"{REPOSITORY}/scripts/build_vocabulary.py speech/train.tsv",
    ):
        done = commands.run(command)
        assert done.returncode == 0, done.stderr


def losses(log: str) -> dict[int, tuple[str, ...]]:
    """Update -> what was logged of it: its loss, gradient norm, learning rate and largest gamma."""
    entries = map(json.loads, re.findall(r"train_inner \| (\{.*\})", log))
    names = ("loss", "gnorm", "lr", "gamma/encoder/00")
    return {int(entry["num_updates"]): tuple(entry.get(name) or "" for name in names) for entry in entries}


def what_counts(path: Path) -> dict[str, Any]:
    """Of a checkpoint, all but times and the history of its sessions."""
    state = load_checkpoint(path)
    extra = state["extra_state"]
    return {
        "model": state["model"],
        "optimizer": state["last_optimizer_state"],
        "session": state["optimizer_history"][-1],
        "extra": {name: extra[name] for name in ("train_iterator", "val_loss", "best", "speech_mt")},
    }


def differences(one: Any, other: Any, name: str = "") -> Iterator[str]:
    """The names under which two nested states differ."""
    if isinstance(one, torch.Tensor):
        if not torch.equal(one, other):
            yield name
    elif isinstance(one, Mapping):
        for key in sorted(one.keys() | other.keys(), key=str):
            if key not in one or key not in other:
                yield f"{name}.{key}"
            else:
                yield from differences(one[key], other[key], f"{name}.{key}")
    elif isinstance(one, (list, tuple)) and len(one) == len(other):
        for i, pair in enumerate(zip(one, other, strict=True)):
            yield from differences(*pair, f"{name}[{i}]")
    elif one != other and not (one != one and other != other):
        yield name


def wait_for_update(run: Running) -> bool:
    """Until it trains, or has ended; whether it trains."""
    while "train_inner" not in run.output():
        if not run.runs():
            return False
        time.sleep(0.02)
    return True


def kill_sometime(run: Running, save_dir: Path, draw: random.Random, seconds: float) -> str:
    """SIGKILL it while it trains, or while it writes a checkpoint; what was done."""
    if not wait_for_update(run):
        return ""
    while_writing = draw.random() < OF_WRITING
    end = time.monotonic() + draw.uniform(0, seconds)
    while time.monotonic() < end and run.runs():
        time.sleep(0.001)
    while while_writing and run.runs() and not any(save_dir.glob("*.tmp")):
        time.sleep(0.0002)
    if not run.runs():
        return ""
    os.kill(run.pid, signal.SIGKILL)
    return WRITING if while_writing else "killed"


def compare(straight: Done, logs: list[str], folder: Path, name: str) -> list[str]:
    """What a run that was interrupted has other than the one that was not."""
    expected = losses(straight.stdout)
    found = [f"log of update {u}" for log in logs for u, line in losses(log).items() if expected.get(u) != line]
    if missing := expected.keys() - {u for log in logs for u in losses(log)}:
        found.append(f"updates never seen: {sorted(missing)}")
    states = [what_counts(folder / run / "checkpoint_last.pt") for run in (f"{name}-straight", f"{name}-killed")]
    return found + list(differences(*states))


def run_straight(commands: Commands, name: str) -> tuple[Done, float]:
    """The run that nobody disturbs, and how many seconds it trains."""
    run = commands.start(f"{TASKS[name]} --save-dir {name}-straight")
    wait_for_update(run)
    begin = time.monotonic()
    done = run.wait()
    assert done.returncode == 0, done.stderr
    return done, time.monotonic() - begin


def run_killed(
    commands: Commands, name: str, kills: int, draw: random.Random, seconds: float
) -> tuple[list[str], list[str], int]:
    """Start, kill within ``seconds`` of its first update, start again, until it ends.

    Returns:
        the logs; what was done, at most ``kills`` times; and how many files looked like checkpoints and were broken.
    """
    save_dir = commands.folder / f"{name}-killed"
    shutil.rmtree(save_dir, ignore_errors=True)
    logs, done_to_it, broken = [], [], 0
    while True:
        run = commands.start(f"{TASKS[name]} --save-dir {name}-killed")
        what = kill_sometime(run, save_dir, draw, seconds) if len(done_to_it) < kills else ""
        done = run.wait()
        logs.append(done.stdout)
        for path in save_dir.glob("*.pt"):
            try:
                load_checkpoint(path)
            except ValueError:
                broken += 1
        if done.returncode == 0:
            return logs, done_to_it, broken
        assert done.returncode == -signal.SIGKILL, done.stderr
        done_to_it.append(what)


def full_disk(commands: Commands, straight: Done, size: str = "400k") -> str:
    """The same training on a disk that fills up, and then has room again."""
    disk = commands.folder / "translation-killed"
    shutil.rmtree(disk, ignore_errors=True)
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        return "not run: no permission to mount a small disk"
    try:
        command = f"{TASKS['translation']} --keep-interval-updates 100 --save-dir translation-killed"
        first = commands.run(command)
        said = first.stderr.strip().splitlines()[-1:]
        if first.returncode == 0 or "No space left on device" not in first.stderr:
            return f"the disk did not fill up: {said}"
        subprocess.run(["mount", "-o", "remount,size=100m", disk], check=True)
        second = commands.run(command)
        different = compare(straight, [first.stdout, second.stdout], commands.folder, "translation")
        return f"stopped by {said}, went on: {different or 'nothing lost'}"
    finally:
        subprocess.run(["umount", disk], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of all trainings together")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    server = Server()
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        commands = Commands(server, Path(folder))
        write_data(commands.folder, commands)
        straights = {}
        for name in TASKS:
            straights[name], seconds = run_straight(commands, name)
            different, what, broken, rounds = [], [], 0, 0
            while len(what) < args.kills // len(TASKS):
                left = args.kills // len(TASKS) - len(what)
                logs, done_to_it, broken_now = run_killed(commands, name, left, draw, seconds / 3)
                different += compare(straights[name], logs, commands.folder, name)
                what, broken, rounds = what + done_to_it, broken + broken_now, rounds + 1
            lost += len(different) + broken
            updates = len(losses(straights[name].stdout))
            print(
                f"{name}, {updates} updates: {len(what)} kills in {rounds} runs, {what.count(WRITING)} of them while a "
                f"checkpoint was written; {broken} broken checkpoints; different: {different[:10] or 'nothing'}",
                flush=True,
            )
        print(f"full disk: {full_disk(commands, straights['translation'])}")
    print(f"lost: {lost}")
    server.close()
    raise SystemExit(lost > 0)


if __name__ == "__main__":
    main()
