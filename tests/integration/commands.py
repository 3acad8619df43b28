"""fairseq commands in a second or two each: see :mod:`tests.integration.command_server`."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from .conftest import REPOSITORY, Done

SERVER = Path(__file__).with_name("command_server.py")


class Running:
    """A command that has been started."""

    def __init__(self, server: Server, words: list[str], pid: int, files: tuple[Path, Path]) -> None:
        self.server, self.words, self.pid, self.files = server, words, pid, files

    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def output(self) -> str:
        """What it has printed so far."""
        return self.files[0].read_text(errors="replace") if self.files[0].exists() else ""

    def wait(self) -> Done:
        """Its exit code, negative if a signal ended it, and what it printed."""
        code = int(self.server.ask(f"wait {self.pid}"))
        return Done(self.words, code, *(path.read_text(errors="replace") for path in self.files))


class Server:
    """The process that has imported fairseq; it takes ten seconds to start."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._server = subprocess.Popen(
            [sys.executable, SERVER, REPOSITORY / "user_dir"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._server.stdout.readline() == "ready\n"

    def ask(self, line: str) -> str:
        self._server.stdin.write(line + "\n")
        self._server.stdin.flush()
        return self._server.stdout.readline()

    def close(self) -> None:
        self._server.stdin.close()
        self._server.wait()


class Commands:
    """Runs commands in ``folder``."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self._outputs = Path(tempfile.mkdtemp(prefix="commands"))
        self._count = 0

    def start(self, command: str, **environment: str) -> Running:
        """Run ``fairseq-train ...``, another of fairseq's commands, or a Python file."""
        self._count += 1
        words = shlex.split(command)
        files = tuple(self._outputs / f"{self._count}.{name}" for name in ("out", "err"))
        request = dict(zip(("out", "err"), map(str, files), strict=True))
        request |= {"words": words, "folder": str(self.folder), "environment": environment}
        return Running(self.server, words, int(self.server.ask(json.dumps(request))), files)

    def run(self, command: str, **environment: str) -> Done:
        """Run it to its end."""
        return self.start(command, **environment).wait()
