"""Raw text in, plain text out, in fairseq-interactive and wherever --bpe or --remove-bpe is sentencepiece: by the rules
of prepare_text.py."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from speech_mt.data.text import SideReport, read_lines
from speech_mt.data.vocabulary import PIECE_BOUNDARY, detokenize, encode, load_sentencepiece
from speech_mt.errors import InputError


def bytes_are_printed() -> bool:
    """Whether the byte pieces of a model with byte fallback are printed as they are."""
    from fairseq.data import data_utils

    return data_utils.post_process("<0x41>", "sentencepiece") != "A"


def spell_bytes() -> None:
    from fairseq.data import data_utils
    from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE
    from omegaconf import OmegaConf

    stock_post_process, stock_encode = data_utils.post_process, SentencepieceBPE.encode

    def post_process(sentence: str, symbol: str) -> str:
        return detokenize(sentence.split(" ")) if symbol == "sentencepiece" else stock_post_process(sentence, symbol)

    def init(self: Any, cfg: Any) -> None:
        if OmegaConf.is_config(cfg) and OmegaConf.is_missing(cfg, "sentencepiece_model"):
            raise InputError("--bpe sentencepiece needs the model: add --sentencepiece-model, such as data/spm.model")
        self.enable_sampling, self.alpha = cfg.sentencepiece_enable_sampling, cfg.sentencepiece_alpha
        self.sp = load_sentencepiece(Path(cfg.sentencepiece_model))

    def encode_text(self: Any, text: str) -> str:
        return stock_encode(self, text) if self.enable_sampling else " ".join(next(encode([text], self.sp)))

    def decode(self: Any, pieces: str) -> str:
        """Words that --remove-bpe has joined already stay apart."""
        return detokenize(pieces.split(" ")) if PIECE_BOUNDARY in pieces else pieces

    data_utils.post_process = post_process
    SentencepieceBPE.__init__ = init
    SentencepieceBPE.encode, SentencepieceBPE.decode = encode_text, decode


def lines_are_split_at_carriage_returns() -> bool:
    """Whether fairseq-interactive runs here, and reads lines as text files have them."""
    interactive = sys.modules.get("fairseq_cli.interactive")
    return interactive is not None and interactive.buffered_read.__module__ == interactive.__name__


def read_lines_of_a_parallel_text() -> None:
    sys.modules["fairseq_cli.interactive"].buffered_read = buffered_read


def buffered_read(source: str, buffer_size: int) -> Iterator[list[str]]:
    """The lines of a file, or of standard input (``-``), in groups of ``buffer_size``; a line ends at LF only.

    Raises:
        InputError: see :func:`~speech_mt.data.text.read_lines`.
    """
    path = Path("/dev/stdin" if source == "-" else source)
    lines = (line.strip() for line in read_lines(path, SideReport(str(path))))
    while group := list(islice(lines, buffer_size)):
        yield group
