"""Numbers a layer in the training log: one entry a group instead of one a layer.

fairseq's console line would repeat ``entropy/encoder/00=1.8, entropy/encoder/01=1.9, ...`` for every layer of every
kind. Here it reads ``entropy/encoder=1.8 1.9 ...``, layer 0 first. TensorBoard and ``--log-format json`` keep one value
a layer.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping

from fairseq.logging.progress_bar import BaseProgressBar, format_stat

_NUMBERED = re.compile(r"(.+/.+)/\d+$")


def group_layers(stats: Mapping[str, object]) -> OrderedDict[str, str]:
    """Format statistics for a log line; ``name/NN`` of all layers become one entry ``name``.

    What was not measured in this interval is left out.
    """
    grouped: OrderedDict[str, list[str]] = OrderedDict()
    for key, value in stats.items():
        match = _NUMBERED.match(key)
        text = str(format_stat(value))
        if text == "None":
            continue
        if match is None:
            grouped[key] = [text]
        else:
            grouped.setdefault(match[1], []).append(f"{float(text):.3f}")
    return OrderedDict((key, " ".join(values)) for key, values in grouped.items())


def install() -> None:
    """Make fairseq's simple and tqdm progress bars use :func:`group_layers`."""
    BaseProgressBar._format_stats = lambda self, stats: group_layers(stats)
