"""Load a checkpoint without running code from it.

``torch.load`` unpickles, and a pickle can call anything. Here it loads with ``weights_only=True`` and a short
list of further names, :data:`ALLOWED_GLOBALS`: what real fairseq checkpoints hold besides tensors.
"""

from __future__ import annotations

import importlib
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from speech_mt.errors import InputError

TRUST_VARIABLE = "SPEECH_MT_TRUST_CHECKPOINTS"

_OMEGACONF = ("dictconfig.DictConfig", "listconfig.ListConfig", "nodes.AnyNode", "base.Metadata")
_DTYPES = ("Bool", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")
_DTYPES += ("Float16", "Float32", "Float64", "Str", "Bytes")

ALLOWED_GLOBALS: tuple[str, ...] = (
    # options: `args` and, inside `cfg`, the options of every model registered the old way
    "argparse.Namespace",
    # numpy scalars: `best` after --eval-bleu; under the names of numpy 1 and of numpy 2
    "numpy.ndarray",
    "numpy.dtype",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
    *(f"numpy.dtypes.{name}DType" for name in _DTYPES),
    # the dictionary that the tasks of wav2vec and HuBERT keep in `task_state`
    "fairseq.data.dictionary.Dictionary",
    # `cfg` as an object: what rank 0 sends to the other ranks when a run resumes
    *(f"omegaconf.{name}" for name in (*_OMEGACONF, "base.ContainerMetadata")),
    *(f"builtins.{name}" for name in ("dict", "list", "int")),
    "collections.defaultdict",
    "typing.Any",
    "fairseq.distributed.utils._TensorPlaceholder",
)
"""Names that loading may use. All are plain containers: to build one runs no code and opens nothing."""


def trusted() -> bool:
    """Whether the user vouches for this process's checkpoints (``SPEECH_MT_TRUST_CHECKPOINTS=1``)."""
    return os.environ.get(TRUST_VARIABLE, "") not in ("", "0")


def resolve_global(name: str) -> tuple[Callable[..., Any], str]:
    """The object behind an allowed name, and the name: how ``torch.serialization`` takes a safe global."""
    module, _, attribute = name.rpartition(".")
    if module.endswith("core.multiarray"):  # either name of it, whichever numpy is installed
        module = np.empty(0).__reduce__()[0].__module__
    return getattr(importlib.import_module(module), attribute), name


def check_checkpoint(path: str | os.PathLike[str]) -> set[str]:
    """Look at a checkpoint without loading it; return the names of :data:`ALLOWED_GLOBALS` that it uses.

    A file of the format before torch 1.6, a bare pickle, is loaded once to tell.

    Raises:
        InputError: missing, a folder, empty, cut short, no checkpoint, or with a global that is not allowed.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such checkpoint")
    if path.is_dir():
        raise InputError(f"{path}: a folder, not a checkpoint; name a .pt file in it")
    if path.stat().st_size == 0:
        raise InputError(f"{path}: an empty file, not a checkpoint; use an older one")
    with path.open("rb") as file:
        begins_as_zip = file.read(4) == b"PK\x03\x04"
    if not _is_zip(path):
        if begins_as_zip:
            raise InputError(f"{path}: cut short: the end of the file is missing; use an older checkpoint")
        _load(path, used=set())
        return set()
    try:
        found = set(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception as error:  # damaged bytes raise anything
        raise _unloadable(path, error) from error
    known = {item[1] for item in torch.serialization.get_safe_globals() if isinstance(item, tuple)}
    refused = found - set(ALLOWED_GLOBALS) - known
    if refused and not trusted():
        raise _refused(path, refused)
    return found & set(ALLOWED_GLOBALS)


def _is_zip(path: str | os.PathLike[str]) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile as error:  # some damage of the directory at its end
        raise _unloadable(path, error) from error


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a fairseq checkpoint on the CPU; tensors stay on disk (mmap) until they are read.

    Returns fairseq's dictionary: ``model``, the state dict, next to ``cfg`` or ``args``, ``extra_state`` ...

    Raises:
        InputError: see :func:`check_checkpoint`; or the file holds something else than a fairseq checkpoint.
    """
    state = _load(path, check_checkpoint(path))
    if not isinstance(state, dict) or not isinstance(state.get("model"), Mapping):
        found = ", ".join(map(str, list(state)[:5])) if isinstance(state, dict) else type(state).__name__
        raise InputError(f"{path}: not a fairseq checkpoint: it has no `model` (found: {found})")
    return state


def _load(path: str | os.PathLike[str], used: set[str]) -> Any:
    # a dtype's class is not named in the file, so all names are allowed; but fairseq is slow to import
    names = [name for name in ALLOWED_GLOBALS if name in used or not name.startswith("fairseq.")]
    registered = torch.serialization.get_safe_globals()  # to stay: leaving the context removes what it adds
    allowed = [item for item in map(resolve_global, names) if item not in registered]
    try:
        with torch.serialization.safe_globals(allowed):
            mmap = _is_zip(path) or None
            return torch.load(path, map_location="cpu", weights_only=not trusted(), mmap=mmap)
    except Exception as error:  # damaged bytes raise anything
        raise _unloadable(path, error) from error


def _refused(path: str | os.PathLike[str], names: set[str]) -> InputError:
    return InputError(
        f"{path}: refused, nothing was run: loading it would call {', '.join(sorted(names))}, which no "
        f"fairseq checkpoint needs. If you trust the file's origin, set {TRUST_VARIABLE}=1 and run again."
    )


def _unloadable(path: str | os.PathLike[str], error: Exception) -> InputError:
    if refused := re.findall(r"GLOBAL ([\w.]+)", str(error)):
        return _refused(path, set(refused))
    text = str(error).rpartition("WeightsUnpickler error:")[2].strip()
    reason = text.partition("\n")[0] or type(error).__name__
    return InputError(f"{path}: damaged, or not a checkpoint at all ({reason})")
