"""A checkpoint as a model of CTranslate2, for decoding without PyTorch: folded, then converted by their converter.

Scores and translations are fairseq's but for three habits that the caller of ``translate_batch`` has to know:

* a hypothesis that does not end is cut at ``max_decoding_length`` = 256 tokens, in fairseq at ``--max-len-a`` * source
  length + ``--max-len-b`` = 200, and fairseq adds the probability of its end to its score;
* fairseq never selects ``<pad>``, which a trained model finds improbable anyway; ``suppress_sequences=[["<blank>"]]``;
* they return an empty translation of an empty line, fairseq translates it like any other.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from speech_mt.checkpoint.folding import fold_checkpoint
from speech_mt.checkpoint.mismatch import name_some
from speech_mt.checkpoint.writing import save_checkpoint
from speech_mt.diagnostics.inspection import model_options
from speech_mt.errors import InputError

QUANTIZATIONS = ("float32", "int8", "int8_float32", "int16", "float16", "bfloat16", "int8_float16", "int8_bfloat16")
EXPORTED = ("config.json", "model.bin", "*vocabulary*")  # what the converter writes
SENTENCEPIECE = "*.model"  # what users put beside it


def export_ctranslate2(
    state: Mapping[str, Any],
    data: Path,
    out: Path,
    quantization: str = "float32",
    force: bool = False,
    subset: str | None = None,
) -> None:
    """Convert a loaded checkpoint of a text-to-text model to the folder ``out``, which is made whole or not at all.

    Args:
        state: what ``load_checkpoint`` returns, of a model of this plugin or of fairseq's ``transformer``.
        data: the folder of ``fairseq-preprocess``, for its two dictionaries.
        out: the folder to make.
        quantization: one of :data:`QUANTIZATIONS`.
        force: replace ``out`` if it is an earlier export; a sentencepiece model in it stays.
        subset: of ``data``, if the caller is going to need it.

    Raises:
        InputError: CTranslate2 is not installed; the model holds what it cannot compute, and what; ``out`` exists, or
            holds more than an export; a dictionary or ``subset`` is missing.
    """
    try:
        from ctranslate2.converters import FairseqConverter
    except ImportError:
        raise InputError("CTranslate2 is not installed: pip install 'speech_mt[deploy]'") from None
    check_replaceable(out, force)
    weights, options = stock_model(state)
    source, target = languages(state, data)
    if subset and not any((*data.glob(f"{subset}.{source}-{target}.*"), *data.glob(f"{subset}.{target}-{source}.*"))):
        raise InputError(f"{data}/{subset}.{source}-{target}.{source}.idx: no such file: give another --subset")

    out = out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        path, made = Path(folder) / "folded.pt", Path(folder) / "made"
        save_checkpoint({"model": weights, "args": Namespace(**options, task="translation")}, path)
        converter = FairseqConverter(str(path), str(data), source_lang=source, target_lang=target)
        try:
            with torch.serialization.safe_globals([Namespace]):
                converter.convert(str(made), quantization=quantization)
        except ValueError as error:  # their list of what is not supported
            reasons = [line.removeprefix("- ") for line in str(error).splitlines() if line.startswith("- ")]
            raise InputError(f"CTranslate2 cannot compute this model: {'; '.join(reasons) or error}") from None
        if out.exists():
            for model in out.glob(SENTENCEPIECE):
                shutil.copy2(model, made)
            out.rename(Path(folder) / "replaced")
        made.rename(out)


def check_replaceable(out: Path, force: bool) -> None:
    """See that writing the folder ``out`` deletes nothing but, with ``force``, an earlier export.

    Raises:
        InputError: it would.
    """
    if not out.exists():
        return
    if not force:
        raise InputError(f"{out} exists: give another folder, or --force to replace it")
    if not out.is_dir():
        raise InputError(f"{out} is a file: give a folder that may be made")
    exported = {path for pattern in (*EXPORTED, SENTENCEPIECE) for path in out.glob(pattern) if path.is_file()}
    if others := sorted(path.name for path in set(out.iterdir()) - exported):
        raise InputError(
            f"{out} holds what no export wrote ({name_some(others)}), which --force would delete: give another folder"
        )


def stock_model(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights and options of fairseq's ``transformer`` that compute what the checkpoint computes.

    Raises:
        InputError: there are none, and why.
    """
    options = model_options(state)
    name = str(options.get("_name") or options.get("arch"))
    if not name.startswith("spectral_"):
        return dict(state["model"]), options | {"arch": options.get("arch") or name}
    folded, reasons = fold_checkpoint(dict(state))
    if reasons:
        raise InputError(f"the model does not fold into a plain Transformer: {'; '.join(reasons)}")
    return folded["model"], folded["cfg"]["model"]


def task_options(state: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the task in a loaded checkpoint."""
    options = (state.get("cfg") or {}).get("task") or state.get("args") or {}
    return dict(options if isinstance(options, Mapping) else vars(options))


def languages(state: Mapping[str, Any], data: Path) -> tuple[str, str]:
    """Source and target language, from the checkpoint or else from the names of the files in ``data``.

    Raises:
        InputError: the dictionaries of the two are not there.
    """
    task = task_options(state)
    pair = task.get("source_lang"), task.get("target_lang")
    if None in pair:
        names = {path.name.split(".")[1] for path in data.glob("*.*-*.*.idx")}
        if len(names) != 1:
            raise InputError(f"{data}: {len(names)} language pairs in it, one is needed: give another --data")
        source, _, target = names.pop().partition("-")
        pair = source, target
    for language in pair:
        if not (data / f"dict.{language}.txt").exists():
            raise InputError(
                f"{data}/dict.{language}.txt: no such dictionary: --data is the folder of fairseq-preprocess"
            )
    return pair
