"""Options of fairseq's commands: errors that help, and two defaults that work."""

from __future__ import annotations

import argparse
import ast
import difflib
import math
import sys
import types
from collections.abc import Iterable
from typing import Any, NoReturn

from speech_mt.checkpoint.mismatch import name_some
from speech_mt.errors import InputError
from speech_mt.ranges import COUNT, FINITE, NOT_NEGATIVE, POSITIVE, PROBABILITY, Range, check_ranges

RANGES: dict[str, Range] = {
    **dict.fromkeys(("beam", "nbest", "batch_size", "batch_size_valid", "max_tokens", "max_tokens_valid"), COUNT),
    **dict.fromkeys(("log_interval", "save_interval", "validate_interval", "required_batch_size_multiple"), COUNT),
    **dict.fromkeys(("update_freq", "total_num_update"), COUNT),
    **dict.fromkeys(("max_len_a", "max_len_b", "min_len", "num_workers", "warmup_updates", "clip_norm"), NOT_NEGATIVE),
    **dict.fromkeys(("save_interval_updates", "validate_interval_updates", "max_epoch", "max_update"), NOT_NEGATIVE),
    **dict.fromkeys(("lr", "weight_decay", "adam_eps", "momentum", "trust_coefficient"), NOT_NEGATIVE),
    **dict.fromkeys(("label_smoothing", "adam_betas"), PROBABILITY),
    **dict.fromkeys(("lenpen", "unkpen"), FINITE),
    "temperature": POSITIVE,
    "seed": Range(0, 2**32 - 1),
}
"""What fairseq's own commands take, and end in a traceback or in nonsense, if it lies outside."""


class OneLineParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line that names the nearest valid option or choice."""

    def error(self, message: str) -> NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            words = [word.partition("=")[0] for word in message.removeprefix(prefix).split()]
            known = [option for action in self._actions for option in action.option_strings]
            unknown = [
                f"no option {word}: {nearest(word, known)}" for word in words if word.startswith("--")
            ]
            message = "; ".join(unknown) or message
        self.exit(2, f"error: {message}\n")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if action.choices is not None and value not in action.choices:
            meant = nearest(str(value), map(str, action.choices))
            raise argparse.ArgumentError(action, f"no choice {str(value)!r}: {meant}")


def nearest(word: str, words: Iterable[str]) -> str:
    """What a mistyped ``word`` may have meant."""
    words = sorted(words)
    if close := difflib.get_close_matches(word, words, n=3):
        return f"did you mean {' or '.join(close)}?"
    if word.startswith("--"):
        return "none is like it (a model, task, criterion or optimizer adds its options once it is chosen)"
    return f"there are {name_some(words, limit=12)}"


def option_errors_are_pages() -> bool:
    from fairseq import options

    return options.argparse.ArgumentParser is argparse.ArgumentParser


def use_one_line_parser() -> None:
    from fairseq import options

    # get_parser() is running when it imports user_dir: it is the name it looks up next that has to change
    options.argparse = types.SimpleNamespace(**vars(argparse) | {"ArgumentParser": OneLineParser})


def validate_has_no_task() -> bool:
    """Whether a parser without a task (fairseq-validate's) fails to look the task up."""
    from fairseq import options

    parser = argparse.ArgumentParser()
    parser.add_argument("--task")
    parser.add_argument("--batch-size")
    try:
        options.parse_args_and_arch(parser, ["data-bin"])
    except KeyError:
        return True
    return False


def default_to_translation() -> None:
    """As in every other command. The task itself, and all its options, come from the checkpoint."""
    from fairseq import options

    stock = options.parse_args_and_arch

    def parse_args_and_arch(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        for action in parser._actions:
            if action.dest == "task" and action.default is None:
                action.default = "translation"
        return stock(parser, *args, **kwargs)

    options.parse_args_and_arch = parse_args_and_arch


def bf16_means_tpu() -> bool:
    from fairseq import options

    parser = argparse.ArgumentParser()
    for flag in ("--bf16", "--fp16"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--batch-size")
    return options.parse_args_and_arch(parser, ["--bf16"]).tpu


def bf16_needs_no_tpu() -> None:
    from fairseq import options

    stock = options.parse_args_and_arch

    def parse_args_and_arch(parser: argparse.ArgumentParser, input_args: Any = None, **kwargs: Any) -> Any:
        words = sys.argv if input_args is None else input_args
        if {"--bf16", "--memory-efficient-bf16"} & set(words) and {"--fp16", "--memory-efficient-fp16"} & set(words):
            raise InputError("--fp16 and --bf16: give one of them")
        parsed = stock(parser, input_args, **kwargs)
        args = parsed[0] if isinstance(parsed, tuple) else parsed
        if getattr(args, "bf16", False) and "--tpu" not in words:
            args.tpu = False
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


def numbers_are_unchecked() -> bool:
    from fairseq import options

    parser = argparse.ArgumentParser()
    for option in ("--beam", "--batch-size"):
        parser.add_argument(option, type=int)
    try:
        options.parse_args_and_arch(parser, ["--beam", "0"])
    except InputError:
        return False
    return True


def check_numbers() -> None:
    from fairseq import options

    stock = options.parse_args_and_arch

    def parse_args_and_arch(*args: Any, **kwargs: Any) -> Any:
        parsed = stock(*args, **kwargs)
        options = parsed[0] if isinstance(parsed, tuple) else parsed
        check_ranges(options, RANGES)
        check_words(options)
        check_pairs(options)
        return parsed

    options.parse_args_and_arch = parse_args_and_arch


SYMBOLS = ("sentencepiece", "wordpiece", "letter", "silence", "_EOW", "subword_nmt", "@@", "@@ ", "none")


def check_words(options: argparse.Namespace) -> None:
    """Options that are words, which fairseq looks at when it has done most of its work.

    Raises:
        InputError: a ``--remove-bpe`` that fairseq does not know, or ``--model-overrides`` that are no dictionary.
    """
    symbol = getattr(options, "post_process", None)
    if symbol is not None and symbol not in SYMBOLS:
        raise InputError(f"--post-process (--remove-bpe) {symbol}: there are {', '.join(map(str.strip, SYMBOLS))}")
    overrides = getattr(options, "model_overrides", "{}")
    try:
        is_dictionary = isinstance(ast.literal_eval(overrides), dict)
    except (SyntaxError, ValueError):
        is_dictionary = False
    if not is_dictionary:
        raise InputError(f"--model-overrides {overrides}: give a dictionary, such as \"{{'dropout': 0.1}}\"")


def check_pairs(options: argparse.Namespace) -> None:
    """Options that are right by themselves and not together.

    Raises:
        InputError: naming both.
    """
    beam = getattr(options, "ctc_beam", 0) or getattr(options, "beam", math.inf)
    if getattr(options, "nbest", 1) > beam:
        name = "--ctc-beam" if getattr(options, "ctc_beam", 0) else "--beam"
        raise InputError(f"--nbest {options.nbest}: there are only {name} {beam} hypotheses")
    groups = getattr(options, "diverse_beam_groups", -1)
    if groups > 0 and options.beam % groups:
        raise InputError(f"--diverse-beam-groups {groups}: has to divide --beam {options.beam}")
    if getattr(options, "lr_scheduler", None) == "inverse_sqrt" and options.warmup_updates == 0:
        raise InputError("--warmup-updates 0: inverse_sqrt starts from the end of a warm-up, give at least 1")
    betas = getattr(options, "adam_betas", None)
    if betas is not None and len(betas.split(",") if isinstance(betas, str) else betas) != 2:
        raise InputError(f"--adam-betas {betas}: give two, such as '(0.9, 0.98)'")
