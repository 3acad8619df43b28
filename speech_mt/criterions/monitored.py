"""fairseq's losses plus what the monitor sees: the loss, its gradient and its log stay as they are in fairseq."""

# fairseq reads the types of options when it runs: no "from __future__ import annotations" here.

import logging
from dataclasses import dataclass, field
from typing import ClassVar, Optional

from fairseq.criterions import FairseqCriterion, register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.criterions.label_smoothed_cross_entropy_with_ctc import (
    LabelSmoothedCrossEntropyWithCtcCriterion,
    LabelSmoothedCrossEntropyWithCtcCriterionConfig,
)
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.distributed.utils import get_global_rank
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from torch import Tensor, nn

from speech_mt.criterions.ctc import CtcCriterion, CtcCriterionConfig
from speech_mt.criterions.sharpness_probe import SharpnessProbe
from speech_mt.criterions.z_loss import z_loss
from speech_mt.diagnostics import tensorboard, training_loop
from speech_mt.diagnostics.collapse import Collapse, CollapseDetector
from speech_mt.diagnostics.monitor import DEFAULT_QUANTITIES, QUANTITIES, Measured, Monitor
from speech_mt.diagnostics.temperature import TemperatureIntervention
from speech_mt.diagnostics.tensorboard import Board
from speech_mt.diagnostics.training_loop import ON_COLLAPSE
from speech_mt.errors import InputError
from speech_mt.ranges import NOT_NEGATIVE, PROBABILITY, check_ranges
from speech_mt.recovery import nonfinite, rollback
from speech_mt.recovery.nonfinite import NonFiniteBudget, mark_nonfinite

logger = logging.getLogger(__name__)


@dataclass
class MonitorConfig(FairseqDataclass):
    """Options that every monitored criterion has."""

    monitor: str = field(
        default=",".join(DEFAULT_QUANTITIES),
        metadata={"help": f"what to measure: a comma-separated list of {', '.join(QUANTITIES)}"},
    )
    monitor_interval: int = field(
        default=10, metadata={"help": "measure the first update and every N-th; spectra on every tenth of these"}
    )
    sharpness_interval: int = field(
        default=1000,
        metadata={"help": "measure sharpness, on a fixed batch, every N updates; it costs as much as some 100 updates"},
    )
    on_collapse: ChoiceEnum(ON_COLLAPSE) = field(
        default="warn", metadata={"help": "when attention collapses: warn; or also stop, or save a checkpoint"}
    )
    collapse_patience: int = field(
        default=200, metadata={"help": "rank collapse: updates for which tokens are alike and the loss stands still"}
    )
    temperature_intervention: Optional[str] = field(
        default=None,
        metadata={
            "help": "UPDATE:FACTOR:LAYERS, an experiment: from UPDATE on, attention logits are multiplied by FACTOR in "
            "LAYERS of our models: all, or a list such as encoder.0-3,cross.5; a checkpoint does not keep it"
        },
    )
    skip_nonfinite: int = field(
        default=0,
        metadata={"help": "updates with NaN or Inf in features, loss or gradient to skip before training stops"},
    )
    rollback_on_spike: float = field(
        default=0.0,
        metadata={
            "help": "FACTOR, such as 0.5: when the loss spikes, go back to the last checkpoint, on with the data that "
            "follow, and multiply the learning rate by FACTOR; 0: off"
        },
    )
    z_loss: float = field(default=0.0, metadata={"help": "weight of log^2 Z, e.g. 1e-4 (arXiv 2204.02311); 0: off"})


class Monitored:
    """Mixin: runs the loss under a :class:`Monitor`, logs what it measured and looks for collapse.

    Attributes:
        loss_name: the class of fairseq's criterion with the same loss, under whose name checkpoints keep it: a run
            of the plain criterion may so go on under the monitored one, and back.
        collapses: what ``on_collapse`` has still to be done about.
        nonfinite: counts the updates that were left out.
        spiked: whether the loss has, and the run is to go back.
        lr_scale, rollbacks: what that has come to so far.
    """

    loss_name: ClassVar[str]
    running: ClassVar["Monitored | None"] = None  # fairseq reduces metrics by the class: of the one that ran last
    watcher: Monitor
    detector: CollapseDetector
    board: Board
    collapses: list[Collapse]
    on_collapse: str
    intervention: TemperatureIntervention | None
    sharpness_probe: SharpnessProbe | None
    nonfinite: NonFiniteBudget
    rollback_on_spike: float
    spiked: bool = False
    lr_scale: float = 1.0
    rollbacks: int = 0
    z_loss: float
    _sharpness: float | None = None

    @classmethod
    def build_criterion(cls, cfg: MonitorConfig, task: FairseqTask) -> FairseqCriterion:
        """The criterion with its monitor.

        Raises:
            InputError: an option that is none, with what it should be.
        """
        criterion = super().build_criterion(cfg, task)
        quantities = list(filter(None, cfg.monitor.split(",")))
        try:
            criterion.watcher = Monitor(quantities, cfg.monitor_interval)
        except ValueError as error:
            raise InputError(f"--monitor {cfg.monitor} --monitor-interval {cfg.monitor_interval}: {error}") from None
        try:
            criterion.detector = CollapseDetector(cfg.collapse_patience)
        except ValueError as error:
            raise InputError(f"--collapse-patience {cfg.collapse_patience}: {error}") from None
        try:
            probe = SharpnessProbe(cfg.sharpness_interval)
        except ValueError as error:
            raise InputError(f"--sharpness-interval {cfg.sharpness_interval}: {error}") from None
        criterion.sharpness_probe = probe if "sharpness" in quantities else None
        criterion.collapses, criterion.on_collapse = [], str(cfg.on_collapse)
        text = cfg.temperature_intervention
        criterion.intervention = None if text is None else TemperatureIntervention.parse(text)
        criterion.board = Board(quantities)
        check_ranges(cfg, {"z_loss": NOT_NEGATIVE, "skip_nonfinite": NOT_NEGATIVE, "rollback_on_spike": PROBABILITY})
        criterion.z_loss = cfg.z_loss
        criterion.nonfinite = NonFiniteBudget(cfg.skip_nonfinite)
        criterion.rollback_on_spike = cfg.rollback_on_spike
        nonfinite.install()
        rollback.install()
        tensorboard.install(criterion.board)
        training_loop.install()
        return criterion

    def forward(self, model: nn.Module, sample: dict, reduce: bool = True) -> tuple[Tensor, int, dict]:
        """The stock loss and log, and the monitor's sums."""
        Monitored.running = self
        plain = self.watcher.attach(model)
        clock = self.watcher.clock
        if clock.num_updates is None:  # it came to the model after fairseq told the number
            clock.num_updates = _last("num_updates") or 0
        if self.intervention is not None:
            self.intervention.apply(self.watcher.attentions, clock.num_updates)
        probe = self.sharpness_probe
        if probe is not None and model.training and get_global_rank() == 0 and probe.is_due(clock.num_updates):
            self._sharpness = probe.measure(super().forward, plain, sample, clock.num_updates)
        target_input = sample["net_input"].get("prev_output_tokens")
        padding_mask = None if target_input is None else target_input.eq(self.padding_idx)
        with self.watcher.watch(model, padding_mask):
            loss, sample_size, logging_output = super().forward(model, sample, reduce=reduce)
        logging_output.update(self.watcher.statistics())
        return mark_nonfinite(loss) if model.training and reduce else loss, sample_size, logging_output

    def plain_loss(self, model: nn.Module, sample: dict) -> tuple[Tensor, int, dict]:
        """The stock loss and log, unwatched."""
        return super().forward(model, sample)

    def training_state(self) -> dict[str, object]:
        """What a resumed training has to know, plain numbers."""
        state = {name: getattr(self, name) for name in ("lr_scale", "rollbacks")}
        return state | {"detector": self.detector.state_dict(), "nonfinite_skipped": self.nonfinite.skipped}

    def load_training_state(self, state: dict) -> None:
        """Go on where :meth:`training_state` was taken."""
        self.lr_scale, self.rollbacks = state["lr_scale"], state["rollbacks"]
        self.nonfinite.skipped = state["nonfinite_skipped"]
        self.detector.load_state_dict(state["detector"])
        self.watcher.wants_cosine = self.detector.wants_cosine

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict]) -> None:
        """The stock metrics, and a number a layer of what was measured."""
        super().reduce_metrics(logging_outputs)
        if cls.running is not None:
            cls.running._report(logging_outputs)

    def _report(self, logging_outputs: list[dict]) -> None:
        """Once an update, on all ranks: log, look for collapse, and keep what TensorBoard is to show."""
        measured = self.watcher.reduce(logging_outputs)
        if measured is not None:
            log_measured(measured)
        if not self.watcher.in_training:
            return
        update = self.watcher.clock.num_updates + 1
        loss = float(metrics.get_active_aggregators()[-1]["loss"].val)
        collapses = self.detector.update(update, loss, _last("gnorm"), measured)
        self.spiked = self.rollback_on_spike > 0 and self.detector.loss_spiked(update)
        self.watcher.wants_cosine = self.detector.wants_cosine
        if self._sharpness is not None:
            metrics.log_scalar("sharpness", self._sharpness, round=6)
            self._sharpness = None
        metrics.log_scalar("spike_score", self.detector.spikes.score, weight=0, round=6)
        if measured is not None:
            self.board.note(update, measured)
        for collapse in collapses:
            self.board.warn(collapse)
            if get_global_rank() == 0:
                logger.warning(str(collapse))
        if self.on_collapse != "warn":
            self.collapses += collapses


def log_measured(measured: Measured) -> None:
    """Log through fairseq's metrics, a number a layer: in the training log and in TensorBoard.

    ``entropy/<kind>/<layer>`` is the mean over heads and queries in nats, ``entropy_normalised/...`` that of entropy
    over log(visible keys), ``max_logit/...`` the largest of all heads; ``cosine/<stack>/<layer>``, ``hfc_lfc`` and
    ``rank_residual`` are means over sentences; ``gamma``, ``spectral_norm`` and the like are of the weights. fairseq
    averages over the measured updates of a log interval.
    """
    for name, layers in measured.layers.items():
        counts = measured.counts.get(name, {})
        for layer, value in layers.items():
            metrics.log_scalar(f"{name}/{layer:02d}", value, counts.get(layer, 1), round=6)
    for kind, rows in measured.nonfinite.items():
        metrics.log_scalar(f"entropy_nonfinite/{kind}", rows)


def _last(key: str) -> float | None:
    """The latest value that fairseq logged. After a resume, ``metrics.get_meter`` would show the one before it."""
    meters = (aggregator.get(key) for aggregator in reversed(metrics.get_active_aggregators()))
    values = (meter.val for meter in meters if meter is not None and meter.val is not None)
    return next((float(value) for value in values), None)


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

    loss_name = "LabelSmoothedCrossEntropyCriterion"


@dataclass
class LabelSmoothedWithCtcConfig(MonitorConfig, LabelSmoothedCrossEntropyWithCtcCriterionConfig):
    pass


@register_criterion("label_smoothed_cross_entropy_with_ctc_and_entropy", dataclass=LabelSmoothedWithCtcConfig)
class LabelSmoothedCrossEntropyWithCtcAndEntropy(Monitored, WithZLoss, LabelSmoothedCrossEntropyWithCtcCriterion):
    """Label-smoothed cross-entropy and CTC on the encoder, for speech."""

    loss_name = "LabelSmoothedCrossEntropyWithCtcCriterion"


@dataclass
class CtcConfig(MonitorConfig, CtcCriterionConfig):
    pass


@register_criterion("ctc_with_entropy", dataclass=CtcConfig)
class CtcWithEntropy(Monitored, CtcCriterion):
    """CTC, for speech encoders."""

    loss_name = "CtcCriterion"
