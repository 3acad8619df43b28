"""Connectionist temporal classification (Graves et al. 2006) for encoders that shorten their input.

The loss is fairseq's ``ctc``; fairseq's own takes the length of the input features for that of the encoder's output,
which fails as soon as the encoder subsamples.
"""

# fairseq reads the types of options when it runs: no "from __future__ import annotations" here.

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from fairseq.criterions import FairseqCriterion
from fairseq.dataclass import FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from omegaconf import II
from torch import Tensor, nn

from speech_mt.criterions.z_loss import z_loss
from speech_mt.errors import InputError

BLANK = 0  # <s> of the dictionary, as in fairseq


@dataclass
class CtcCriterionConfig(FairseqDataclass):
    """Options of the loss."""

    zero_infinity: bool = field(
        default=False, metadata={"help": "count utterances too short for their transcript as loss 0"}
    )
    sentence_avg: bool = II("optimization.sentence_avg")


class CtcCriterion(FairseqCriterion):
    """CTC loss in nats, summed over the batch. The model's output holds ``padding_mask`` (B, S) or None."""

    z_loss = 0.0

    def __init__(self, task: FairseqTask, zero_infinity: bool, sentence_avg: bool) -> None:
        super().__init__(task)
        self.eos_idx = task.target_dictionary.eos()
        self.zero_infinity = zero_infinity
        self.sentence_avg = sentence_avg

    def forward(self, model: nn.Module, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """Loss, its divisor (target letters, or utterances with ``--sentence-avg``), and numbers to log."""
        net_output = model(**sample["net_input"])
        log_probs = model.get_normalized_probs(net_output, log_probs=True).contiguous()  # (S, B, V)
        frames = log_probs.new_full((log_probs.shape[1],), log_probs.shape[0], dtype=torch.long)
        if net_output["padding_mask"] is not None:
            frames = (~net_output["padding_mask"]).sum(dim=1)

        target = sample["target"]
        letters = (target != self.padding_idx) & (target != self.eos_idx)
        if not self.zero_infinity:
            self._refuse_too_short(sample, letters, frames)
        with torch.backends.cudnn.flags(enabled=False):
            loss = F.ctc_loss(
                log_probs,
                target.masked_select(letters),
                frames,
                letters.sum(dim=1),
                blank=BLANK,
                reduction="sum" if reduce else "none",
                zero_infinity=self.zero_infinity,
            )
        if self.z_loss > 0:
            counted = torch.arange(len(log_probs), device=frames.device)[:, None] < frames  # (S, B)
            extra = self.z_loss * z_loss(net_output["encoder_out"], counted).sum(0)
            loss = loss + (extra.sum() if reduce else extra)
        sample_size = target.shape[0] if self.sentence_avg else sample["ntokens"]
        return (
            loss,
            sample_size,
            {
                "loss": loss.detach().sum(),
                "ntokens": sample["ntokens"],
                "nsentences": target.shape[0],
                "sample_size": sample_size,
            },
        )

    def _refuse_too_short(self, sample: dict, letters: Tensor, frames: Tensor) -> None:
        """CTC needs a frame for each letter and a blank between equal neighbours; with fewer its loss is infinite."""
        target = sample["target"]
        repeats = (target[:, 1:] == target[:, :-1]) & letters[:, 1:]
        needed = letters.sum(dim=1) + repeats.sum(dim=1)
        short = (frames < needed).nonzero().flatten().tolist()
        if short:
            i = short[0]
            raise InputError(
                f"utterance in row {int(sample['id'][i])} (from 0) of its manifest: {int(frames[i])} encoder frames, "
                f"and CTC needs {int(needed[i])} for its transcript ({len(short)} such in this batch); "
                "--zero-infinity counts them as loss 0, --ctc-subsampling with the encoder's factor drops them from "
                "training"
            )

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """Loss in bits per unit of the divisor, as fairseq logs it."""
        loss = float(sum(log["loss"] for log in logging_outputs))
        sample_size = float(sum(log["sample_size"] for log in logging_outputs))
        ntokens = float(sum(log["ntokens"] for log in logging_outputs))
        metrics.log_scalar("loss", loss / sample_size / math.log(2), sample_size, round=3)
        if sample_size != ntokens:
            metrics.log_scalar("nll_loss", loss / ntokens / math.log(2), ntokens, round=3)

    @staticmethod
    def logging_outputs_can_be_summed() -> bool:
        return True
