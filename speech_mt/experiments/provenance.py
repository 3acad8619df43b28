"""Where a number came from, and that one study at a time writes it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speech_mt.errors import InputError


@contextmanager
def alone_in(out: Path) -> Iterator[None]:
    """One study a folder at a time.

    Raises:
        InputError: another one is running.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{out}: another study runs there; wait for it or give another --out") from None
        yield


def commit(root: Path) -> str:
    """Of the repository, with -dirty where what is trained differs from it."""

    def git(*arguments: str) -> subprocess.CompletedProcess:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)

    head = git("rev-parse", "--short", "HEAD").stdout.strip()
    clean = git("diff", "--quiet", "HEAD", "--", "speech_mt", "user_dir").returncode == 0
    return (head if clean else f"{head}-dirty") if head else "unknown"


def machine() -> str:
    """Processor, cores and torch."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return f"{processor}, {os.cpu_count()} cores, torch {importlib.metadata.version('torch')}"
