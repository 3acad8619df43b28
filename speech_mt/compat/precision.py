"""--fp16 on CPUs."""

from __future__ import annotations

from typing import Any


def fp16_asks_for_a_gpu() -> bool:
    from fairseq.optim.fp16_optimizer import FP16Optimizer

    return FP16Optimizer.build_optimizer.__func__.__module__ == FP16Optimizer.__module__


def fp16_on_cpu() -> None:
    from fairseq.logging import metrics
    from fairseq.optim.fp16_optimizer import FP16Optimizer
    from fairseq.trainer import Trainer

    stock_build = FP16Optimizer.build_optimizer.__func__

    def build_optimizer(cls: type, cfg: Any, params: Any, **kwargs: Any) -> FP16Optimizer:
        """Master weights are flattened into one for each GPU; on a CPU each weight keeps its own."""
        params = list(params)
        if not any(parameter.is_cuda for parameter in params):
            cfg.common.fp16_no_flatten_grads = True
        return stock_build(cls, cfg, params, **kwargs)

    FP16Optimizer.build_optimizer = classmethod(build_optimizer)

    stock_step = Trainer.train_step.__wrapped__  # below the decorator that opens the metrics' "train" context

    def train_step(
        self: Trainer, samples: list[dict[str, Any]], raise_oom: bool = False
    ) -> dict[str, Any] | None:
        """On overflow the update is skipped, as on a GPU; fairseq then makes a zero with ``.cuda()``."""
        try:
            return stock_step(self, samples, raise_oom)
        except (RuntimeError, AssertionError) as error:
            if self.cuda or not isinstance(error.__context__, OverflowError):
                raise
            self.zero_grad()
            metrics.log_scalar(
                "loss_scale", self.optimizer.scaler.loss_scale, priority=700, round=4, weight=0
            )
            metrics.log_stop_time("train_wall")
            return None

    Trainer.train_step = metrics.aggregate("train")(train_step)
