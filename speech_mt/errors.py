"""One clear line for a user's mistake, instead of a traceback."""

from __future__ import annotations

import sys
from collections.abc import Callable


class InputError(ValueError):
    """Bad input: the message names the file, the line or utterance, what was found and what to do."""


def run(main: Callable[[], int | None]) -> None:
    """Run a script's ``main`` and exit; an :class:`InputError` or a missing file becomes one line and exit code 1."""
    try:
        code = main()
        sys.stdout.flush()
    except InputError as error:
        sys.exit(f"error: {error}")
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        name = error.filename or ("standard output" if _stdout_fails() else None)
        sys.exit(f"error: {f'{name}: ' if name else ''}{error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code or 0)


def _stdout_fails() -> bool:
    """Whether nothing can be printed. What could not be has been dropped, so a flush would not tell."""
    try:
        print(flush=True)
    except OSError:
        return True
    return False
