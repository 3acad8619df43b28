"""Best-path decoding of CTC models (Graves et al., 2006, section 3.2): in each frame the likeliest symbol,
repeats collapsed, blanks dropped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speech_mt.errors import InputError

Hypothesis = dict[str, Any]


class CTCGreedyGenerator:
    """Takes the place of fairseq's SequenceGenerator for models without a decoder.

    Attributes:
        symbols_to_strip_from_output: ids that fairseq leaves out where it prints hypotheses.
    """

    def __init__(self, blank: int, symbols_to_strip_from_output: set[int]) -> None:
        self.blank = blank
        self.symbols_to_strip_from_output = symbols_to_strip_from_output

    @torch.no_grad()
    def generate(
        self,
        models: Sequence[nn.Module],
        sample: Mapping[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
    ) -> list[list[Hypothesis]]:
        """Decode a batch; several models are an ensemble, their probabilities averaged per frame.

        Args:
            models: each is called with ``sample["net_input"]`` less ``prev_output_tokens`` and must return a
                dict with ``padding_mask`` or ``encoder_padding_mask``, bool of shape (batch, frames) or None;
                ``get_normalized_probs`` of it must give log-probabilities of shape (frames, batch, symbols).
            sample: a batch of a fairseq dataset.
            prefix_tokens, constraints: of beam search; there must be none.

        Returns:
            For each utterance a list of one hypothesis; see :func:`best_path`.
        """
        if prefix_tokens is not None or constraints is not None:
            raise InputError(
                "CTC best-path decoding knows no --prefix-size and no --constraints; leave them out"
            )
        net_input = {key: value for key, value in sample["net_input"].items() if key != "prev_output_tokens"}
        outputs = [model(**net_input) for model in models]
        log_probs = torch.stack(
            [
                model.get_normalized_probs(output, log_probs=True)
                for model, output in zip(models, outputs, strict=True)
            ]
        )
        mean = log_probs.logsumexp(dim=0) - torch.tensor(float(len(models))).log()
        return [
            [hypothesis]
            for hypothesis in best_path(mean.transpose(0, 1), _lengths(outputs[0], mean), self.blank)
        ]


def best_path(log_probs: Tensor, lengths: Sequence[int], blank: int) -> list[Hypothesis]:
    """The most probable alignment of each utterance, read off frame by frame.

    Args:
        log_probs: (batch, frames, symbols).
        lengths: frames of each utterance; later ones are padding.
        blank: id of the blank.

    Returns:
        For each utterance a hypothesis as fairseq prints it: ``tokens``, int64 of shape (units,); ``score``,
        the alignment's log-probability per frame; ``positional_scores``, the mean log-probability over each
        token's frames; ``alignment``, pairs (first frame, unit); ``attention``, None.
    """
    best_scores, best_symbols = (values.cpu() for values in log_probs.max(dim=-1))
    return [
        _collapse(symbols[:length], scores[:length].float(), blank)
        for symbols, scores, length in zip(best_symbols, best_scores, lengths, strict=True)
    ]


def _collapse(symbols: Tensor, scores: Tensor, blank: int) -> Hypothesis:
    runs, run_of_frame, run_lengths = symbols.unique_consecutive(return_inverse=True, return_counts=True)
    run_scores = scores.new_zeros(len(runs)).index_add_(0, run_of_frame, scores) / run_lengths
    first_frames = run_lengths.cumsum(0) - run_lengths
    spoken = runs != blank
    return {
        "tokens": runs[spoken],
        "score": scores.mean().item() if len(scores) else 0.0,
        "positional_scores": run_scores[spoken],
        "alignment": list(zip(first_frames[spoken].tolist(), range(int(spoken.sum())), strict=True)),
        "attention": None,
    }


def _lengths(output: Mapping[str, Any], log_probs: Tensor) -> list[int]:
    """Real encoder frames of each utterance; ``log_probs`` is (frames, batch, symbols)."""
    key = "padding_mask" if "padding_mask" in output else "encoder_padding_mask"
    padding_mask = output[key]
    if padding_mask is None:
        return [log_probs.size(0)] * log_probs.size(1)
    return (~padding_mask).sum(dim=1).tolist()
