"""Commands that are run once: each one's output goes to a log, and what is done is not done again."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError

BIN = Path(sys.executable).parent  # where fairseq's commands are
_TAIL = 20_000  # bytes of a log that tell how far a command is


class Progress:
    """One line for all running commands: rewritten in a terminal, repeated every 15 seconds elsewhere."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}
        self._shown = 0.0

    def show(self) -> None:
        line = " | ".join(f"{name} {state}" for name, state in self.running.items())
        if sys.stdout.isatty():
            print(f"\r\033[K{line[:150]}", end="", flush=True)
        elif time.time() - self._shown > 15:
            self._shown = time.time()
            print(line, flush=True)

    def say(self, text: str) -> None:
        print(f"\r\033[K{text}" if sys.stdout.isatty() else text, flush=True)


def run_command(
    folder: Path,
    step: str,
    arguments: Sequence[str],
    *,
    root: Path,
    progress: Progress,
    state: Callable[[str], str] | None = None,
) -> None:
    """Run one command in ``root`` on one core, unless it was completed before; output goes to ``folder/step.log``.

    Args:
        folder: of the run; ``step.completed`` there says that the same command was completed.
        state: from the end of the log, how far the command is.

    Raises:
        InputError: the command failed; names its log.
    """
    done = folder / f"{step}.completed"
    if _completed(done) == list(arguments):
        progress.say(f"{folder.name} {step}: done already")
        return
    folder.mkdir(parents=True, exist_ok=True)
    progress.say(f"$ {shlex.join(arguments)}")
    log = folder / f"{step}.log"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(arguments)}\n".encode())
        start = output.tell()
        process = subprocess.Popen(arguments, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT)
    key = f"{folder.name} {step}"
    try:
        while process.poll() is None:
            if state is None:
                progress.running[key] = "..."
            else:
                with log.open("rb") as text:
                    text.seek(max(start, log.stat().st_size - _TAIL))
                    progress.running[key] = state(text.read().decode(errors="replace"))
            progress.show()
            time.sleep(1)
    finally:
        process.terminate()
        progress.running.pop(key, None)
    if process.returncode < 0:
        raise InputError(f"{key} was ended by signal {-process.returncode} (its output is in {log})")
    if process.returncode:
        tail = log.read_text(errors="replace").strip().splitlines()[-1]
        raise InputError(f"{key} failed with {process.returncode}: {tail} (all of it is in {log})")
    with atomic_path(done) as temporary:
        temporary.write_text(json.dumps(list(arguments)))


def _completed(done: Path) -> object:
    """The command that a file says was completed; none if it is not there or damaged, as a full disk leaves it."""
    try:
        return json.loads(done.read_text())
    except (FileNotFoundError, ValueError):
        return None
