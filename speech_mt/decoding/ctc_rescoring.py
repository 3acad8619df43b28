"""Joint CTC/attention decoding in two passes (Watanabe et al., 2017, "Hybrid CTC/Attention Architecture for End-to-End
Speech Recognition", section IV-B, rescoring): attention's beam search proposes, the CTC head of the encoder helps to
choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speech_mt.decoding.ctc_generator import Hypothesis, ctc_log_probs
from speech_mt.errors import InputError


class CTCRescoringGenerator:
    """fairseq's SequenceGenerator, its n-best lists ranked anew by (1 - w) ln p_attention + w ln p_CTC.

    The weighted sum is divided by length ** lenpen as attention's alone was; so weight 0 changes no score and no order.
    """

    def __init__(self, generator: nn.Module, weight: float, blank: int) -> None:
        """``weight`` is w; ``generator`` is the beam search, ``blank`` the id of the blank.

        Raises:
            InputError: the weight is not in 0 ... 1.
        """
        if not 0 <= weight <= 1:
            raise InputError(f"--ctc-rescore-weight {weight}: give a weight from 0 (attention alone) to 1 (CTC alone)")
        self.generator = generator
        self.weight = weight
        self.blank = blank
        self.symbols_to_strip_from_output = generator.symbols_to_strip_from_output

    @torch.no_grad()
    def generate(self, models: Sequence[nn.Module], sample: Mapping[str, Any], **kwargs: Any) -> list[list[Hypothesis]]:
        """Decode a batch: for each utterance the beam's hypotheses, best first, ``score`` that of both."""
        lists = self.generator.generate(models, sample, **kwargs)
        log_probs, lengths = ctc_log_probs(models, sample["net_input"])
        return [
            self._rescore(hypotheses, frames[:length])
            for hypotheses, frames, length in zip(lists, log_probs, lengths, strict=True)
        ]

    def _rescore(self, hypotheses: list[Hypothesis], log_probs: Tensor) -> list[Hypothesis]:
        unspoken = torch.tensor([self.generator.eos, self.blank])
        transcripts = [tokens[~torch.isin(tokens, unspoken)] for tokens in (h["tokens"].cpu() for h in hypotheses)]
        for hypothesis, ctc in zip(hypotheses, transcript_log_probs(log_probs, transcripts, self.blank), strict=True):
            attention = float(hypothesis["score"])
            if self.generator.normalize_scores:
                ctc /= len(hypothesis["tokens"]) ** self.generator.len_penalty
            hypothesis["score"] = (1 - self.weight) * attention + self.weight * ctc if self.weight else attention
        return sorted(hypotheses, key=lambda hypothesis: -hypothesis["score"])


def transcript_log_probs(log_probs: Tensor, transcripts: Sequence[Tensor], blank: int) -> list[float]:
    """ln p(transcript) summed over its alignments, -inf where there are too few frames for it.

    Args:
        log_probs: float32 (frames, symbols) of one utterance.
        transcripts: int64 (units,) each, without blanks.
    """
    many = log_probs.cpu()[:, None].expand(-1, len(transcripts), -1)
    losses = F.ctc_loss(
        many,
        torch.cat(list(transcripts)),
        torch.full((len(transcripts),), len(log_probs)),
        torch.tensor([len(transcript) for transcript in transcripts]),
        blank=blank,
        reduction="none",
    )
    return (-losses).tolist()
