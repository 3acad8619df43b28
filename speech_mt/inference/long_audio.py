"""Where to cut audio that is too long for a model, so that no word is lost or doubled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from speech_mt.errors import InputError

_PAUSE_FRAMES = 20  # 0.2 s


@dataclass(frozen=True)
class Chunk:
    """Frames ``start`` to ``end`` go into the model; its output for ``keep_start`` to ``keep_end`` is kept.

    The kept parts of all chunks are the whole, each frame once.
    """

    start: int
    end: int
    keep_start: int
    keep_end: int


def overlapping_chunks(frames: int, size: int, overlap: int, stride: int) -> list[Chunk]:
    """For models that score each frame (CTC): neighbours overlap, and each gives up the half where it sees less.

    Args:
        frames: of the whole.
        size: most frames of a chunk.
        overlap: frames that neighbours share, at least.
        stride: frames in for one frame out; all cuts are multiples of it.

    Raises:
        InputError: the overlap leaves nothing of a chunk.
    """
    if frames <= size:
        return [Chunk(0, frames, 0, frames)]
    margin = -(-overlap // (2 * stride)) * stride
    hop = size // stride * stride - 2 * margin
    if hop < stride:
        raise InputError(f"chunks of {size} frames that overlap by {overlap} advance by nothing: overlap them less")
    starts = range(0, frames - 2 * margin, hop)
    last = len(starts) - 1
    return [
        Chunk(
            start,
            min(start + hop + 2 * margin, frames),
            start + margin if k else 0,
            start + hop + margin if k < last else frames,
        )
        for k, start in enumerate(starts)
    ]


def cut_at_pauses(features: Tensor, size: int, window: int) -> list[Chunk]:
    """For models whose output has no frames (attention): no overlap, but cuts where it is quietest.

    Args:
        features: (frames, bins) log-mel, not normalised.
        size: most frames of a chunk.
        window: the last frames of a chunk, in which the quietest moment is looked for.

    Raises:
        InputError: the window is the whole chunk.
    """
    if window >= size:
        raise InputError(f"a chunk of {size} frames cannot be cut within its last {window}: overlap them less")
    cuts = [0, *_cuts(features, size, window), len(features)]
    return [Chunk(start, end, start, end) for start, end in zip(cuts, cuts[1:], strict=False)]


def _cuts(features: Tensor, size: int, window: int) -> Iterator[int]:
    loudness = features.float().mean(dim=1)
    smooth = F.avg_pool1d(
        F.pad(loudness[None], (_PAUSE_FRAMES // 2, _PAUSE_FRAMES // 2), mode="replicate"), _PAUSE_FRAMES, stride=1
    )[0]
    start = 0
    while len(features) - start > size:
        first = start + size - window
        start = first + int(torch.argmin(smooth[first : start + size]))
        yield start
