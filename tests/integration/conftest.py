"""Commands run as users run them: each spends many seconds on imports, so they run once, two at a time."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from speech_mt.checkpoint import load_checkpoint

REPOSITORY = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PLUGIN = f"--user-dir '{REPOSITORY / 'user_dir'}'"
SENTENCES = {"train": 60, "valid": 20, "test": 50}

Done = subprocess.CompletedProcess
Result = Callable[[str], Done]


def write_corpus(folder: Path) -> None:
    """A tiny parallel corpus, train, valid and test, de and en: reversed sentences."""
    generator = random.Random(1)
    for split, count in SENTENCES.items():
        sentences = [[f"w{generator.randrange(30)}" for _ in range(generator.randint(2, 9))] for _ in range(count)]
        (folder / f"{split}.de").write_text("".join(" ".join(s) + "\n" for s in sentences))
        (folder / f"{split}.en").write_text("".join(" ".join(reversed(s)) + "\n" for s in sentences))


@contextmanager
def running(folder: Path, commands: Mapping[str, tuple[str | None, str]]) -> Iterator[Result]:
    """Start commands, name -> (the command that has to be done before, the command); yields name -> finished."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    started: dict[str, Future[Done]] = {}

    def run(before: str | None, command: str) -> Done:
        if before:
            started[before].result()
        arguments = shlex.split(command)
        return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)

    with ThreadPoolExecutor(2) as pool:
        for name, command in commands.items():
            started[name] = pool.submit(run, *command)
        yield lambda name: started[name].result()


def losses(done: Done) -> dict[str, str]:
    """From the log: update -> loss."""
    assert done.returncode == 0, done.stderr
    lines = re.findall(r"train_inner \| (\{.*\})", done.stdout)
    return {entry["num_updates"]: entry["loss"] for entry in map(json.loads, lines)}


def weights(path: Path) -> dict:
    """The model's state dict in a checkpoint."""
    return load_checkpoint(path)["model"]


def hypotheses(done: Done) -> list[str]:
    """The H- and D- lines of fairseq-generate."""
    assert done.returncode == 0, done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith(("H-", "D-")))


@pytest.fixture(scope="session")
def command_server():
    """What runs commands without importing fairseq for each."""
    from .commands import Server

    server = Server()
    yield server
    server.close()
