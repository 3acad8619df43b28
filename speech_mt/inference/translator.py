"""Raw text to plain text with a translation model, in batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from fairseq import utils
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from speech_mt.data.text import is_empty
from speech_mt.errors import InputError
from speech_mt.inference.search import search_options

_NAMED = 5  # texts named in a message


class Translator:
    """A model of the task ``translation``; made by :func:`speech_mt.load`."""

    def __init__(self, task: FairseqTask, model: nn.Module, device: torch.device, bpe: Any, tokenizer: Any) -> None:  # noqa: ANN401
        """``bpe`` and ``tokenizer`` as fairseq builds them, or None."""
        self.task = task
        self.model = model
        self.device = device
        self._codecs = [codec for codec in (tokenizer, bpe) if codec is not None]

    def translate(
        self, texts: Iterable[str], *, batch_size: int = 64, max_tokens: int = 12000, **generation: Any
    ) -> list[str]:
        """Translate each text; what fairseq-generate and fairseq-interactive give, in the order of ``texts``.

        A text is one sentence: line breaks in it are spaces. One without anything to print becomes "". Characters that
        the vocabulary lacks are ``<unk>``.

        Args:
            texts: any number, of any length up to the model's.
            batch_size: the most texts translated at once.
            max_tokens: the most source tokens at once, padding counted.
            generation: options of the search, named as in ``fairseq-generate``: ``beam`` (5), ``lenpen`` (1),
                ``max_len_a`` (0) and ``max_len_b`` (200), the longest translation for x source tokens: a x + b.

        Raises:
            InputError: texts longer than the model takes, or what is no text; options that the search has not, or out
                of range. Nothing has been translated then.
        """
        if isinstance(texts, str):
            raise InputError("translate takes a list of texts, and got one text: put it into a list")
        texts = list(texts)
        odd = next((i for i, text in enumerate(texts) if not isinstance(text, str)), None)
        if odd is not None:
            raise InputError(f"translate takes texts; number {odd}, from 0, is {texts[odd]!r}")
        if min(batch_size, max_tokens) < 1:
            raise InputError(f"batch_size {batch_size}, max_tokens {max_tokens}: have to be at least 1")
        generator = self.task.build_generator([self.model], search_options(generation))
        filled = [i for i, text in enumerate(texts) if not is_empty(text)]
        sources = [self._encode(texts[i]) for i in filled]
        self._refuse_too_long({i: len(source) for i, source in zip(filled, sources, strict=True)}, max_tokens)
        dataset = self.task.build_dataset_for_inference(sources, [len(source) for source in sources])
        translations = [""] * len(texts)
        batches = dataset.batch_by_size(dataset.ordered_indices(), max_tokens, batch_size) if sources else []
        for rows in batches:
            sample = dataset.collater([dataset[row] for row in rows])
            sample = utils.apply_to_sample(lambda tensor: tensor.to(self.device), sample)
            hypotheses = self.task.inference_step(generator, [self.model], sample)
            for row, (best, *_) in zip(sample["id"].tolist(), hypotheses, strict=True):
                translations[filled[row]] = self._decode(best["tokens"], generator)
        return translations

    def _encode(self, text: str) -> Tensor:
        line = " ".join(text.removeprefix("\ufeff").splitlines())
        for codec in self._codecs:
            line = codec.encode(line)
        return self.task.source_dictionary.encode_line(line, add_if_not_exist=False).long()

    def _decode(self, tokens: Tensor, generator: Any) -> str:  # noqa: ANN401
        line = self.task.target_dictionary.string(
            tokens.int().cpu(), extra_symbols_to_ignore=generator.symbols_to_strip_from_output
        )
        for codec in reversed(self._codecs):
            line = codec.decode(line)
        return line

    def _refuse_too_long(self, lengths: dict[int, int], max_tokens: int) -> None:
        longest = utils.resolve_max_positions(self.task.max_positions(), self.model.max_positions())[0]
        limit = min(longest, max_tokens)
        if over := [i for i, length in lengths.items() if length > limit]:
            named = ", ".join(f"{i} ({lengths[i]:,} tokens)" for i in over[:_NAMED])
            rest = f" and {len(over) - _NAMED:,} more" if len(over) > _NAMED else ""
            raise InputError(
                f"{len(over):,} of the texts have more than {limit:,} tokens, the end of sentence counted: number "
                f"{named}{rest}, from 0; split them into sentences"
            )
