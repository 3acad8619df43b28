"""fairseq's losses plus what the monitor sees: the loss, its gradient and its log stay as they are in fairseq."""

# fairseq reads the types of options when it runs: no "from __future__ import annotations" here.

from dataclasses import dataclass, field

from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.criterions.label_smoothed_cross_entropy_with_ctc import (
    LabelSmoothedCrossEntropyWithCtcCriterion,
    LabelSmoothedCrossEntropyWithCtcCriterionConfig,
)
from fairseq.dataclass import FairseqDataclass
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from speech_mt.criterions.ctc import CtcCriterion, CtcCriterionConfig
from speech_mt.criterions.z_loss import z_loss
from speech_mt.diagnostics.monitor import QUANTITIES, Monitor, log_statistics
from speech_mt.errors import InputError


@dataclass
class MonitorConfig(FairseqDataclass):
    """Options that every monitored criterion has."""

    monitor: str = field(
        default="entropy", metadata={"help": f"what to measure: a comma-separated list of {', '.join(QUANTITIES)}"}
    )
    monitor_interval: int = field(default=10, metadata={"help": "measure training on every N-th update"})
    z_loss: float = field(default=0.0, metadata={"help": "weight of log^2 Z, e.g. 1e-4 (arXiv 2204.02311); 0: off"})


class Monitored:
    """Mixin: runs the loss under a :class:`Monitor` and logs what it measured."""

    watcher: Monitor
    z_loss: float

    @classmethod
    def build_criterion(cls, cfg: MonitorConfig, task: FairseqTask) -> FairseqCriterion:
        """The criterion with its monitor.

        Raises:
            InputError: ``--monitor`` names something unknown, or the interval is not positive.
        """
        criterion = super().build_criterion(cfg, task)
        try:
            criterion.watcher = Monitor(list(filter(None, cfg.monitor.split(","))), cfg.monitor_interval)
        except ValueError as error:
            raise InputError(f"--monitor {cfg.monitor} --monitor-interval {cfg.monitor_interval}: {error}") from None
        criterion.z_loss = cfg.z_loss
        return criterion

    def forward(self, model: nn.Module, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The stock loss and log, and the monitor's sums."""
        target_input = sample["net_input"].get("prev_output_tokens")
        padding_mask = None if target_input is None else target_input.eq(self.padding_idx)
        with self.watcher.watch(model, padding_mask):
            loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
        logging_output.update(self.watcher.statistics())
        return loss, sample_size, logging_output

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """The stock metrics, and a number a layer of what was measured."""
        super().reduce_metrics(logging_outputs)
        log_statistics(logging_outputs)


class WithZLoss:
    """Mixin for the cross-entropies: ``--z-loss`` joins the loss, not the logged nll_loss."""

    def compute_loss(
        self, model: nn.Module, net_output: tuple[Tensor, dict], sample: dict, reduce: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Loss and negative log-likelihood, summed over the batch or (B * T, 1) each."""
        loss, nll_loss = super().compute_loss(model, net_output, sample, reduce)
        if self.z_loss > 0:
            extra = self.z_loss * z_loss(net_output[0], sample["target"].ne(self.padding_idx))
            loss = loss + (extra.sum() if reduce else extra.view_as(loss))
        return loss, nll_loss


@dataclass
class LabelSmoothedConfig(MonitorConfig, LabelSmoothedCrossEntropyCriterionConfig):
    pass


@register_criterion("label_smoothed_cross_entropy_with_entropy", dataclass=LabelSmoothedConfig)
class LabelSmoothedCrossEntropyWithEntropy(Monitored, WithZLoss, LabelSmoothedCrossEntropyCriterion):
    """Label-smoothed cross-entropy, for translation."""


@dataclass
class LabelSmoothedWithCtcConfig(MonitorConfig, LabelSmoothedCrossEntropyWithCtcCriterionConfig):
    pass


@register_criterion("label_smoothed_cross_entropy_with_ctc_and_entropy", dataclass=LabelSmoothedWithCtcConfig)
class LabelSmoothedCrossEntropyWithCtcAndEntropy(Monitored, WithZLoss, LabelSmoothedCrossEntropyWithCtcCriterion):
    """Label-smoothed cross-entropy and CTC on the encoder, for speech."""


@dataclass
class CtcConfig(MonitorConfig, CtcCriterionConfig):
    pass


@register_criterion("ctc_with_entropy", dataclass=CtcConfig)
class CtcWithEntropy(Monitored, CtcCriterion):
    """CTC, for speech encoders."""


# fairseq keeps the optimizer on resuming only if the criterion's class name is the same: a run of the plain criterion
# may so go on under the monitored one, and back.
LabelSmoothedCrossEntropyWithEntropy.__name__ = "LabelSmoothedCrossEntropyCriterion"
LabelSmoothedCrossEntropyWithCtcAndEntropy.__name__ = "LabelSmoothedCrossEntropyWithCtcCriterion"
CtcWithEntropy.__name__ = "CtcCriterion"
