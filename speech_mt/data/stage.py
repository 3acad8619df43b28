"""Work that is done once: files that appear whole or not at all, and stages that a second run skips."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
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


def run_stage(
    folder: Path,
    name: str,
    settings: Mapping[str, object],
    work: Callable[[], str],
    inputs: Mapping[str, object] | None = None,
    outputs: Iterable[Path] = (),
) -> None:
    """Do ``work`` unless ``folder`` says that it was done; print one line either way.

    ``work`` returns that line. It, ``settings`` and ``inputs`` are kept as JSON in
    ``folder/.<name>.completed``. An interrupted stage leaves no such file, so ``work`` is called again.

    Args:
        folder: where the result is, and the file that says so.
        name: of the stage.
        settings: what the user chose that decides the result.
        work: makes the result and returns its summary.
        inputs: digests of what is read, if ``work`` may be done again when that has changed.
        outputs: what ``work`` makes: it is done again when one of these is missing.

    Raises:
        InputError: the stage was completed with other settings, so what lies there is not what was asked for; or what
            says so is damaged.
    """
    marker = folder / f".{name}.completed"
    asked, read = json.loads(json.dumps([settings, inputs]))
    if marker.exists():
        try:
            done = json.loads(marker.read_text(encoding="utf-8"))
        except ValueError:
            raise InputError(f"{marker} is damaged: delete it, and the work is done again") from None
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
        missing = next((path for path in outputs if not path.exists()), None)
        if done.get("inputs") != read:
            print(f"{name}: what it was made from has changed, so it is made again", flush=True)
        elif missing:
            print(f"{name}: {missing} is missing, so it is made again", flush=True)
        else:
            print(f"{name}: done already ({done['summary']})", flush=True)
            return
        marker.unlink()
    summary = work()
    with atomic_path(marker) as temporary:
        done = {"summary": summary, "settings": asked, "inputs": read}
        temporary.write_text(json.dumps(done, indent=1), encoding="utf-8")
    print(f"{name}: {summary}", flush=True)
