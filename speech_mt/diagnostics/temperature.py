"""Temperature intervention: scale the attention logits of some layers in the middle of a training, as an experiment.

Zhai et al. 2023 change the temperature of attention to show that entropy collapse follows from it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from speech_mt.diagnostics.sites import KINDS, Site
from speech_mt.errors import InputError
from speech_mt.modules.attention import MultiheadAttention

_PLACE = re.compile(rf"({'|'.join(KINDS)})(?:\.(\d+)(?:-(\d+))?)?")


@dataclass(frozen=True)
class TemperatureIntervention:
    """From ``update`` on, logits are multiplied by ``factor`` (a temperature of 1/factor).

    Attributes:
        places: kind, first and last layer.
    """

    update: int
    factor: float
    places: tuple[tuple[str, int, float], ...]

    @classmethod
    def parse(cls, text: str) -> TemperatureIntervention:
        """``UPDATE:FACTOR:LAYERS``, e.g. ``500:4:all``, ``500:4:encoder``, ``500:0.5:encoder.0-3,cross.5``.

        Raises:
            InputError: it is none.
        """
        error = InputError(
            f"--temperature-intervention {text}: want UPDATE:FACTOR:LAYERS, such as 500:4:all or "
            f"500:0.5:encoder.0-3,cross.5; kinds of attention are {', '.join(KINDS)}"
        )
        try:
            update, factor, layers = text.split(":")
            update, factor = int(update), float(factor)
        except ValueError:
            raise error from None
        if update < 0 or not 0 < factor < math.inf:
            raise error
        places = []
        for place in ",".join(KINDS).split(",") if layers == "all" else layers.split(","):
            match = _PLACE.fullmatch(place)
            if match is None:
                raise error
            kind, first, last = match.groups()
            places.append((kind, int(first or 0), math.inf if first is None else int(last or first)))
        return cls(update, factor, tuple(places))

    def apply(self, attentions: Sequence[Site], updates: int) -> None:
        """Set the scale of the attentions that are meant, if ``updates`` updates are done: call it before each batch.

        Raises:
            InputError: nothing is meant, or an attention is not one of speech_mt's.
        """
        if updates < self.update:
            return
        meant = [site for site in attentions if any(k == site.kind and a <= site.layer <= b for k, a, b in self.places)]
        if not meant:
            raise InputError("--temperature-intervention: the model has none of these layers")
        for site in meant:
            if not isinstance(site.module, MultiheadAttention):
                raise InputError(
                    f"--temperature-intervention: {type(site.module).__module__} has no scale to set; use an --arch "
                    "spectral_..."
                )
            site.module.scale = self.factor * site.module.head_dim**-0.5
