"""Do two decoders of one model agree? fairseq's, and CTranslate2's on the converted model, sentence by sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ctranslate2 import Translator
    from fairseq.data import Dictionary
    from fairseq.models import FairseqEncoderDecoderModel

TIE = 1e-3
"""Log-probabilities that differ by less may be ordered either way: float32 sums depend on their order."""


@dataclass(frozen=True)
class Disagreement:
    """One sentence that the two decoders translate differently.

    ``position`` is the first token that differs, ``margin`` how much more probable fairseq's choice is there (log,
    given the same beginning, by the original model). Greedy search is wrong if the margin is not that of a tie; beam
    search compares whole hypotheses, so it may differ anyway.
    """

    sentence: int
    ours: list[str]
    theirs: list[str]
    position: int
    margin: float


def compare_decoders(
    model: FairseqEncoderDecoderModel,
    dictionary: Dictionary,
    translator: Translator,
    sources: Sequence[Tensor],
    source_dictionary: Dictionary,
    beam: int = 1,
    max_length: int = 200,
) -> list[Disagreement]:
    """Translate ``sources`` by both; return where they disagree.

    Args:
        model: in evaluation mode, ready for generation.
        dictionary: of the target.
        translator: the converted model.
        sources: (S,) token ids each, with the end of sentence.
        beam: hypotheses; 1 is greedy search.
        max_length: tokens of a hypothesis at most.
    """
    from fairseq.sequence_generator import SequenceGenerator

    generator = SequenceGenerator([model], dictionary, beam_size=beam, max_len_b=max_length)
    pieces = [[source_dictionary[token] for token in source[:-1].tolist()] for source in sources]
    results = translator.translate_batch(pieces, beam_size=beam, max_decoding_length=max_length)
    found = []
    for number, (source, result) in enumerate(zip(sources, results, strict=True)):
        batch = {"src_tokens": source[None], "src_lengths": torch.tensor([len(source)])}
        tokens = generator.generate([model], {"net_input": batch})[0][0]["tokens"][:-1].tolist()
        ours, theirs = [dictionary[token] for token in tokens], result.hypotheses[0]
        if ours != theirs:
            found.append(_disagreement(model, dictionary, number, batch, ours, theirs))
    return found


def _disagreement(
    model: FairseqEncoderDecoderModel,
    dictionary: Dictionary,
    sentence: int,
    batch: dict[str, Tensor],
    ours: list[str],
    theirs: list[str],
) -> Disagreement:
    end = dictionary.eos_word
    pairs = zip([*ours, end], [*theirs, end], strict=False)
    position, choices = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    previous = torch.tensor([[dictionary.eos(), *map(dictionary.index, ours[:position])]])
    with torch.no_grad():
        scores = model(**batch, prev_output_tokens=previous)[0][0, -1]
    our_score, their_score = (scores[dictionary.index(choice)].item() for choice in choices)
    return Disagreement(sentence, ours, theirs, position, our_score - their_score)
