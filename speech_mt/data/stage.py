"""Work that is done once: files that appear whole or not at all, and stages that a second run skips."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from speech_mt.errors import InputError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``path``; it becomes ``path`` on success and is deleted on any error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def run_stage(folder: Path, name: str, settings: Mapping[str, object], work: Callable[[], str]) -> None:
    """Do ``work`` unless ``folder`` says that it was done; print one line either way.

    ``work`` returns that line. It and ``settings``, whatever decides the result, are kept as JSON in
    ``folder/.<name>.completed``. An interrupted stage leaves no such file, so ``work`` is called again.

    Raises:
        InputError: the stage was completed with other settings, so what lies there is not what was asked for.
    """
    marker = folder / f".{name}.completed"
    asked = json.loads(json.dumps(settings))
    if marker.exists():
        done = json.loads(marker.read_text(encoding="utf-8"))
        made = done["settings"]
        changed = [
            f"{key} was {made.get(key)}, is now {asked.get(key)}"
            for key in sorted(made.keys() | asked.keys())
            if made.get(key) != asked.get(key)
        ]
        if changed:
            raise InputError(
                f"{folder} holds a result of other settings ({'; '.join(changed)}): "
                "delete that folder or choose another one"
            )
        print(f"{name}: done already ({done['summary']})", flush=True)
        return
    summary = work()
    with atomic_path(marker) as temporary:
        temporary.write_text(json.dumps({"summary": summary, "settings": asked}, indent=1), encoding="utf-8")
    print(f"{name}: {summary}", flush=True)
