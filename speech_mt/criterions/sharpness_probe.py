"""Sharpness in the middle of a training: of the criterion's loss, on a batch that stays the same."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from speech_mt.diagnostics.sharpness import sharpness
from speech_mt.errors import InputError

TOLERANCE, MAX_ITERATIONS = 1e-2, 20  # a product costs two to three updates


class SharpnessProbe:
    """Measures on the first training batch that it sees, without dropout, and leaves everything as it was.

    Args:
        interval: in updates.

    Raises:
        ValueError: it is not positive.
    """

    def __init__(self, interval: int) -> None:
        if interval < 1:
            raise ValueError(f"want a number of updates, at least 1, not {interval}")
        self.interval = interval
        self._batch: dict | None = None
        self._measured_at: int | None = None

    def is_due(self, updates: int) -> bool:
        """Whether this is the first micro-batch after ``updates`` updates, and one of the interval's."""
        return updates % self.interval == 0 and updates != self._measured_at

    def measure(
        self,
        criterion: Callable[[nn.Module, dict], tuple[Tensor, int, dict]],
        model: nn.Module,
        batch: dict,
        updates: int,
    ) -> float:
        """Largest eigenvalue of the Hessian of ``criterion``'s mean loss.

        Args:
            model: not DistributedDataParallel-wrapped.
            batch: kept if it is the first.

        Raises:
            InputError: the weights are half precision.
        """
        self._measured_at = updates
        if self._batch is None:
            self._batch = batch

        def mean_loss() -> Tensor:
            loss, sample_size, _ = criterion(model, self._batch)
            return loss / sample_size

        modes = {module: module.training for module in model.modules()}
        model.eval()
        try:
            found = sharpness(mean_loss, model.parameters(), tolerance=TOLERANCE, max_iterations=MAX_ITERATIONS)
        except ValueError as error:
            raise InputError(f"--monitor sharpness: {error}") from None
        finally:
            for module, training in modes.items():
                module.training = training
        return found.eigenvalue
