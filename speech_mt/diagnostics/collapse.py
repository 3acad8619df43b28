"""Tells two failures of attention apart while a model trains, and both from attention that is merely sparse.

*Entropy collapse* (Zhai et al. 2023): the attention of a layer becomes one-hot, its logits grow without end, and the
gradient grows, then the loss; or nothing is ever learnt. Low entropy alone is no collapse: a head that has learnt where
to look is sparse, too, and learning it makes entropy fall and logits rise; but its loss is healthy.

*Rank collapse* (Dong et al. 2021): tokens become alike, so that attention has nothing to choose from and is uniform, up
to the end of a stack, whose output no longer depends on its input. Deep post-LN models pass through this state early
and may leave it: it is a failure when the loss stands still.

The thresholds are ours, set on small runs that failed either way and on runs that did not.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from speech_mt.diagnostics.monitor import Measured
from speech_mt.diagnostics.spikes import SpikeScore

ENTROPY_COLLAPSE, RANK_COLLAPSE = "entropy collapse", "rank collapse"
STACKS = ("encoder", "decoder")

HISTORY, ENOUGH = 200, 6  # measurements that are remembered; those needed before a fall can be sharp
FALL, RISE = 2.0, 4.0  # entropy is divided, the largest logit multiplied by this, against the best in memory
LOW = 0.2  # a share of log(keys)
TROUBLE = 10  # updates over which the gradient norm is large, or for which a spike of the loss counts
LARGE_GRADIENT = 3.0  # against its median before
RISING_LOSS = 0.05  # rise of the mean loss, in units of the first loss
UNLEARNT = 0.6  # a loss that stands still above this share of the first one
SPIKE_MINIMUM = 50  # updates before one can be judged

UNIFORM, ALIKE = 0.999, 0.999  # normalised entropy, and cosine of tokens, from which a layer counts as collapsed
RECOVERED = 0.99  # below this it no longer does
STANDSTILL = 0.01  # relative change of the mean loss, from the older half of the patience to the newer


class Collapse(NamedTuple):
    """The beginning of an episode, in one kind of attention."""

    failure: str
    kind: str
    layers: tuple[int, ...]
    head: int | None  # the sharpest of the sharpest layer
    update: int
    evidence: str

    def __str__(self) -> str:
        head = "" if self.head is None else f", head {self.head} first"
        return f"update {self.update}: {self.failure} in {self.kind} {_layers(self.layers)}{head}: {self.evidence}"


class CollapseDetector:
    """Reads the numbers of a training as they come; ranks that read the same come to the same conclusions.

    Args:
        patience: updates for which tokens have to be alike and the loss has to stand still.
    """

    def __init__(self, patience: int = 200) -> None:
        if patience < 2:
            raise ValueError(f"collapse patience is a number of updates, at least 2, not {patience}")
        self.patience = patience
        self.spikes = SpikeScore(minimum=SPIKE_MINIMUM)
        self.wants_cosine = False
        self._series: dict[str, deque[float]] = {name: deque(maxlen=patience) for name in ("loss", "gradient norm")}
        self._first_loss: float | None = None
        self._loss_spike: int | None = None
        self._sharpness: dict[str, deque[np.ndarray]] = {}  # kind -> (2, L): normalised entropy, largest logit
        self._alike_since: dict[str, int] = {}
        self._episodes: dict[tuple[str, str, int], float] = {}  # to the entropy above which it is over

    def update(
        self, update: int, loss: float, gradient_norm: float | None, measured: Measured | None = None
    ) -> list[Collapse]:
        """Add one update; return what begins with it. An episode is reported once.

        Args:
            update: its number.
            loss: its loss, over all ranks.
            gradient_norm: before clipping; None if it is not known.
            measured: if the monitor measured it: ``entropy_normalised/...`` and ``max_logit/...`` for entropy
                collapse, ``entropy_normalised/...`` and ``cosine/...`` for rank collapse, as far as they are there.
        """
        self._note(update, {"loss": loss} | ({} if gradient_norm is None else {"gradient norm": gradient_norm}))
        if measured is None:
            return []
        kinds = [name.partition("/")[2] for name in measured.layers if name.startswith("entropy_normalised/")]
        self.wants_cosine = False
        found = [c for stack in STACKS if stack in kinds for c in self._rank_collapse(update, stack, measured)]
        return found + [c for kind in kinds for c in self._entropy_collapse(update, kind, measured)]

    def _note(self, update: int, values: dict[str, float]) -> None:
        past = self._series["loss"]
        spiked = "loss" in self.spikes.update(**values)
        if spiked and not (past and values["loss"] <= sum(past) / len(past)):  # a sudden fall is no trouble; NaN is
            self._loss_spike = update
        if self._first_loss is None:
            self._first_loss = abs(values["loss"])
        for name, value in values.items():
            self._series[name].append(value)

    def loss_spiked(self, update: int) -> bool:
        """Whether the loss of this update, the latest, jumped up from those before it."""
        return self._loss_spike == update

    def state_dict(self) -> dict[str, object]:
        """Plain numbers and lists, safe to save in a checkpoint."""
        return {
            "spikes": self.spikes.state_dict(),
            "series": {name: list(values) for name, values in self._series.items()},
            "first_loss": self._first_loss,
            "loss_spike": self._loss_spike,
            "sharpness": {kind: [now.tolist() for now in memory] for kind, memory in self._sharpness.items()},
            "alike_since": dict(self._alike_since),
            "episodes": [[*key, entropy] for key, entropy in self._episodes.items()],
            "wants_cosine": bool(self.wants_cosine),
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Go on where :meth:`state_dict` was taken; a shorter patience keeps the latest values."""
        self.spikes.load_state_dict(state["spikes"])
        for name, values in state["series"].items():
            self._series[name] = deque(values, maxlen=self.patience)
        self._first_loss, self._loss_spike = state["first_loss"], state["loss_spike"]
        self._sharpness = {
            kind: deque(map(np.array, memory), maxlen=HISTORY) for kind, memory in state["sharpness"].items()
        }
        self._alike_since = dict(state["alike_since"])
        self._episodes = {tuple(key): entropy for *key, entropy in state["episodes"]}
        self.wants_cosine = state["wants_cosine"]

    # -- entropy collapse -----------------------------------------------------------------------------------

    def _entropy_collapse(self, update: int, kind: str, measured: Measured) -> list[Collapse]:
        logits = measured.layers.get(f"max_logit/{kind}", {})
        entropies = measured.layers[f"entropy_normalised/{kind}"]
        depth = 1 + max(entropies, default=-1)
        now = np.array([[layers.get(i, math.nan) for i in range(depth)] for layers in (entropies, logits)])
        memory = self._sharpness.setdefault(kind, deque(maxlen=HISTORY))
        if memory and memory[-1].shape != now.shape:  # a layer that was never measured before
            memory.clear()
        memory.append(now)
        for key in [k for k in self._episodes if k[:2] == (ENTROPY_COLLAPSE, kind)]:
            if not now[0, key[2]] <= self._episodes[key]:
                del self._episodes[key]
        if len(memory) < ENOUGH:
            return []
        past = np.stack(memory)
        # Always two measurements in a row, so that one odd batch does not count.
        entropies_of_two = np.maximum(past[1:, 0], past[:-1, 0]), np.minimum(past[1:, 0], past[:-1, 0])
        logits_of_two = np.minimum(past[1:, 1], past[:-1, 1]), np.maximum(past[1:, 1], past[:-1, 1])
        entropy, logit = entropies_of_two[0][-1], logits_of_two[0][-1]
        before = np.stack([entropies_of_two[1].max(0), logits_of_two[1].min(0)])
        sharp = (entropy < LOW) & (FALL * entropy < before[0]) & (logit > RISE * before[1])
        trouble = self._trouble(update)
        layers = [i for i in np.flatnonzero(sharp).tolist() if (ENTROPY_COLLAPSE, kind, i) not in self._episodes]
        if not layers or not trouble:
            return []
        for i in layers:
            self._episodes[ENTROPY_COLLAPSE, kind, i] = before[0, i] / FALL
        worst = min(layers, key=lambda i: entropy[i])
        evidence = (
            f"normalised entropy {now[0, worst]:.3g} (it was {before[0, worst]:.3g}), largest logit "
            f"{now[1, worst]:.3g} (it was {before[1, worst]:.3g}), {trouble}"
        )
        return [Collapse(ENTROPY_COLLAPSE, kind, tuple(layers), _head(measured, kind, worst), update, evidence)]

    def _trouble(self, update: int) -> str:
        """What is wrong with loss or gradient; empty if nothing is. One large gradient is not."""
        if self._loss_spike is not None and update - self._loss_spike < TROUBLE:
            return f"the loss spiked at update {self._loss_spike}"
        norms, losses = np.array(self._series["gradient norm"]), np.array(self._series["loss"])
        if len(losses) < 3 * TROUBLE:
            return ""
        if len(norms) == len(losses):
            before, now = np.median(norms[:-TROUBLE]), np.median(norms[-TROUBLE:])
            if not now <= max(LARGE_GRADIENT * before, np.quantile(norms[:-TROUBLE], 0.9)):
                return f"gradient norm {now:.3g} (it was {before:.3g})"
        before, now = losses[-3 * TROUBLE : -TROUBLE].mean(), losses[-TROUBLE:].mean()
        if now > before + RISING_LOSS * self._first_loss:
            return f"loss {now:.3g} (it was {before:.3g})"
        still = self._standstill()
        explained = bool(self._alike_since)  # by the other failure
        return f"the loss stands at {still:.3g}" if still > UNLEARNT * self._first_loss and not explained else ""

    def _standstill(self) -> float:
        """The mean loss if it has not changed for as long as patience lasts, else NaN."""
        losses, middle = np.array(self._series["loss"]), self.patience // 2
        if len(losses) < self.patience:
            return math.nan
        older, newer = losses[:middle].mean(), losses[middle:].mean()
        return float(newer) if abs(older - newer) <= STANDSTILL * abs(older) else math.nan

    # -- rank collapse --------------------------------------------------------------------------------------

    def _rank_collapse(self, update: int, stack: str, measured: Measured) -> list[Collapse]:
        entropies = measured.layers[f"entropy_normalised/{stack}"]
        cosines = measured.layers.get(f"cosine/{stack}", {})
        last = max(entropies, default=-1)
        uniform = entropies.get(last, 0.0) >= UNIFORM
        self.wants_cosine |= uniform
        if not cosines and uniform:
            return []  # not measured yet
        key = (RANK_COLLAPSE, stack, last)
        if not (uniform and cosines.get(last, 0.0) >= ALIKE):
            self._alike_since.pop(stack, None)
            if min(entropies.get(last, 0.0), cosines.get(last, 0.0)) < RECOVERED:
                self._episodes.pop(key, None)
            return []
        since = self._alike_since.setdefault(stack, update)
        still = self._standstill()
        if key in self._episodes or update - since < self.patience or math.isnan(still):
            return []
        self._episodes[key] = math.nan
        first = last
        while entropies.get(first - 1, 0.0) >= UNIFORM and cosines.get(first - 1, 0.0) >= ALIKE:
            first -= 1
        evidence = (
            f"attention is uniform (normalised entropy {entropies[last]:.5f}), tokens are alike (cosine "
            f"{cosines[last]:.5f}) and the loss has stood at {still:.3g} for {self.patience} updates"
        )
        return [Collapse(RANK_COLLAPSE, stack, tuple(range(first, last + 1)), None, update, evidence)]


def _head(measured: Measured, kind: str, layer: int) -> int | None:
    heads = measured.heads.get(f"entropy_normalised/{kind}")
    return None if heads is None or heads[layer].isnan().all() else int(heads[layer].nan_to_num(nan=2.0).argmin())


def _layers(layers: tuple[int, ...]) -> str:
    """'layer 3', 'layers 4-17' or 'layers 1, 5'."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    together = layers == tuple(range(layers[0], layers[-1] + 1))
    return f"layers {layers[0]}-{layers[-1]}" if together else f"layers {', '.join(map(str, layers))}"
