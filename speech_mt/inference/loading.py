"""A checkpoint as a translator or transcriber, with the vocabulary that belongs to it."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from speech_mt.checkpoint import load_checkpoint
from speech_mt.compat.languages import complete
from speech_mt.data.vocabulary import PIECE_BOUNDARY
from speech_mt.errors import InputError

if TYPE_CHECKING:
    from speech_mt.inference.transcriber import Transcriber
    from speech_mt.inference.translator import Translator

StrPath = str | os.PathLike[str]


def load(
    path: StrPath, device: str | None = None, data: StrPath | None = None, **task_options: Any
) -> Translator | Transcriber:
    """Load a trained model, folded or not, of this plugin or of stock fairseq.

    Dictionaries, and ``spm.model`` if the vocabulary is one of sentencepiece, are looked for in ``data`` and the folder
    above it; if it is not given, in this order: the data folder that the checkpoint names, and the folder above it; the
    checkpoint's own folder; the folder above that, and ``bin`` in it. Nothing is run from the file: see
    :mod:`speech_mt.checkpoint.loading`.

    Args:
        path: the checkpoint.
        device: of torch, such as ``cpu`` or ``cuda:1``; by default a GPU if there is one.
        data: the folder with the vocabulary.
        task_options: options of the task in place of the checkpoint's, such as ``ctc_beam=16``.

    Returns:
        A translator for a checkpoint of the task ``translation``, a transcriber for one of ``speech_manifest``.

    Raises:
        InputError: an unsafe or damaged file, a vocabulary that is not found (with the places looked in), another task,
            an unknown option or device.
    """
    path = Path(path)
    saved = load_checkpoint(path)
    if missing := [name for name in ("optimizer_history", "extra_state") if name not in saved]:
        raise InputError(f"{path}: not saved by fairseq-train: it has no {' and no '.join(missing)}")
    if saved.get("cfg") is None and saved.get("args") is None:
        raise InputError(f"{path}: holds no options (cfg or args), which say what model its weights belong to")
    device = _device(device)
    _register()
    from fairseq import checkpoint_utils

    from speech_mt.inference.transcriber import Transcriber
    from speech_mt.inference.translator import Translator

    state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
    cfg = _options(state, path, task_options)
    places = list(_places(path, cfg.task.data, data))
    task_name = cfg.task._name
    if task_name == "translation":
        _find_languages(cfg.task, places, path)
        names = [f"dict.{language}.txt" for language in (cfg.task.source_lang, cfg.task.target_lang)]
        cfg.task.eval_bleu = False  # it would prepare to decode in validation
    elif task_name == "speech_manifest":
        names = ["dict.txt"] if str(cfg.task.vocab_type) == "char" else ["dict.txt", "spm.model"]
        cfg.task.eval_wer = False
    else:
        raise InputError(f"{path}: a model of the task {task_name}; translation and speech_manifest can be loaded")
    cfg.task.data = str(_folder_with(names, places, path))
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], state=state)
    model.prepare_for_inference_(cfg)
    model.to(device).eval()
    if task_name == "speech_manifest":
        return Transcriber(task, model, device)
    return Translator(task, model, device, _bpe(cfg, task, places, path), task.build_tokenizer(cfg.tokenizer))


def _register() -> None:
    """What ``--user-dir`` does, but without touching the caller's log and handling of errors."""
    root, hook = logging.getLogger(), sys.excepthook
    handlers, level = list(root.handlers), root.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.INFO)
        import fairseq  # noqa: F401  (it warns, and configures the root logger to print all that anyone logs)

        logging.disable(logging.NOTSET)
    from speech_mt import compat

    compat.apply()
    root.handlers[:], sys.excepthook = handlers, hook
    root.setLevel(level)
    from speech_mt.models import speech_ctc, speech_to_text, text_to_text  # noqa: F401
    from speech_mt.tasks import speech  # noqa: F401


def _device(name: str | None) -> torch.device:
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise InputError(f"device {name!r} cannot be used ({str(error).partition(chr(10))[0]})") from None
    return device


def _options(state: dict[str, Any], path: Path, task_options: dict[str, Any]) -> Any:  # noqa: ANN401
    """The options saved in a checkpoint, as fairseq's commands read them, with the task's replaced."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
    from fairseq.tasks import TASK_DATACLASS_REGISTRY
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    if state.get("args") is not None:
        state["cfg"], state["args"] = convert_namespace_to_omegaconf(state["args"]), None
    cfg = state["cfg"]
    architecture = cfg.model._name
    if architecture not in MODEL_REGISTRY and architecture not in ARCH_MODEL_REGISTRY:
        raise InputError(f"{path}: a model {architecture}, which neither fairseq nor speech_mt knows")
    known = getattr(TASK_DATACLASS_REGISTRY.get(cfg.task._name), "__dataclass_fields__", {})
    for name in task_options:
        if name not in known:
            raise InputError(f"{path}: the task {cfg.task._name} has no option {name}; it has {', '.join(known)}")
    OmegaConf.set_struct(cfg, False)
    with open_dict(cfg.task):
        for name, value in task_options.items():
            try:
                cfg.task[name] = value
            except OmegaConfBaseException as error:
                raise InputError(f"{name} {value!r}: {str(error).partition(chr(10))[0]}") from None
    return cfg


def _places(path: Path, saved: str | None, data: StrPath | None) -> Iterable[Path]:
    """The folders to look in, in order, each once."""
    named = data if data is not None else saved.split(os.pathsep)[0] if saved else None
    places = [] if named is None else [Path(named), Path(named).absolute().parent]
    if data is None:
        beside = path.resolve().parent
        places += [beside, beside.parent, beside.parent / "bin"]
    return dict.fromkeys(place.resolve() for place in places)


def _find_languages(task: Any, places: Sequence[Path], path: Path) -> None:  # noqa: ANN401
    """Languages that fairseq-train was not given it infers, and does not save: they are inferred again."""
    from fairseq.data.data_utils import infer_language_pair

    if task.source_lang is not None and task.target_lang is not None:
        return
    pairs = {place: infer_language_pair(place) for place in places if place.is_dir()}
    place = next((place for place, pair in pairs.items() if None not in pair), None)
    if place is None:
        raise InputError(
            f"{path}: does not say its languages, and no binarised data that do are in {', '.join(map(str, places))}; "
            "add source_lang and target_lang, such as de and en"
        )
    task.source_lang, task.target_lang = complete(task.source_lang, task.target_lang, pairs[place], str(place))


def _folder_with(names: Sequence[str], places: Sequence[Path], path: Path) -> Path:
    for place in places:
        if all((place / name).is_file() for name in names):
            return place
    raise InputError(
        f"{path}: {' and '.join(dict.fromkeys(names))} not found in {', '.join(map(str, places))}; copy what it was "
        "trained with beside the checkpoint, or name the folder (data)"
    )


def _bpe(cfg: Any, task: Any, places: Sequence[Path], path: Path) -> Any:  # noqa: ANN401
    """What splits words into the dictionary's pieces: the saved ``--bpe``, or sentencepiece; None for whole words."""
    from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig

    named = getattr(cfg.bpe, "_name", None)
    if named not in (None, "sentencepiece"):
        return task.build_bpe(cfg.bpe)
    symbols = task.source_dictionary.symbols
    if any("@@" in symbol for symbol in symbols):
        raise InputError(
            f"{path}: its vocabulary is one of subword-nmt, and the checkpoint does not say where the codes are: use "
            "fairseq-interactive with --bpe subword_nmt --bpe-codes CODES"
        )
    if named is None and not any(PIECE_BOUNDARY in symbol for symbol in symbols):
        return None
    model = Path(cfg.bpe.sentencepiece_model) if named else None
    if model is None or not model.is_file():
        model = _folder_with(["spm.model"], places, path) / "spm.model"
    return SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(model)))
