"""Decoding of CTC models in fairseq's terms: what ``fairseq-generate`` and validation call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from speech_mt.errors import InputError

Hypothesis = dict[str, Any]
Decoder = Callable[[Tensor, Sequence[int]], list[list[Hypothesis]]]
"""(batch, frames, symbols) log-probabilities and the frames of each utterance -> its hypotheses, best first."""


class CTCGenerator:
    """Takes the place of fairseq's SequenceGenerator for models without a decoder.

    Attributes:
        decode: best-path decoding or prefix beam search.
        symbols_to_strip_from_output: ids that fairseq leaves out where it prints hypotheses.
    """

    def __init__(self, decode: Decoder, symbols_to_strip_from_output: set[int]) -> None:
        self.decode = decode
        self.symbols_to_strip_from_output = symbols_to_strip_from_output

    @torch.no_grad()
    def generate(
        self,
        models: Sequence[nn.Module],
        sample: Mapping[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
    ) -> list[list[Hypothesis]]:
        """Decode a batch; several models are an ensemble, see :func:`ctc_log_probs`.

        Args:
            models: without a decoder.
            sample: a batch of a fairseq dataset.
            prefix_tokens, constraints: of attention's beam search; there must be none.
        """
        if prefix_tokens is not None or constraints is not None:
            raise InputError("CTC decoding knows no --prefix-size and no --constraints; leave them out")
        return self.decode(*ctc_log_probs(models, sample["net_input"]))


def ctc_log_probs(models: Sequence[nn.Module], net_input: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    """The frames of a batch as CTC models see them.

    Args:
        models: an ensemble, whose probabilities are averaged frame by frame. A model without a decoder returns a dict
            with ``padding_mask`` or ``encoder_padding_mask``, bool (batch, frames) or None, and its
            ``get_normalized_probs`` gives log-probabilities (frames, batch, symbols). Of one with a decoder, the
            encoder's output has the head's ``ctc_logits``, a list of one (frames, batch, symbols).
        net_input: of the batch; ``prev_output_tokens`` is left out.

    Returns:
        float32 (batch, frames, symbols), and the real frames of each utterance.

    Raises:
        InputError: an encoder has no CTC head.
    """
    source = {key: value for key, value in net_input.items() if key != "prev_output_tokens"}
    each = [_model_log_probs(model, source) for model in models]
    mean = torch.stack([log_probs for log_probs, _ in each]).logsumexp(dim=0) - torch.tensor(float(len(models))).log()
    return mean.transpose(0, 1), each[0][1]


def _model_log_probs(model: nn.Module, source: Mapping[str, Any]) -> tuple[Tensor, list[int]]:
    if not hasattr(model, "decoder"):
        output = model(**source)
        log_probs = model.get_normalized_probs(output, log_probs=True).float()
        mask = output["padding_mask" if "padding_mask" in output else "encoder_padding_mask"]
    else:
        output = model.encoder(**source)
        if "ctc_logits" not in output:
            raise InputError(
                "the model has no CTC head to rescore with: leave out --ctc-rescore-weight, or train it with "
                "--criterion label_smoothed_cross_entropy_with_ctc_and_entropy and a --ctc-weight above 0"
            )
        log_probs = output["ctc_logits"][0].float().log_softmax(dim=-1)
        mask = next(iter(output["encoder_padding_mask"]), None)
    if mask is None:
        return log_probs, [log_probs.size(0)] * log_probs.size(1)
    return log_probs, (~mask).sum(dim=1).tolist()
