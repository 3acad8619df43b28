"""Positions of speech frames: sinusoids of continuous, centred and, in training, shifted time.

CAPE, continuous augmented positional embeddings (Likhomanenko et al., NeurIPS 2021, arXiv 2106.03143, section 3). With
t a frame's time in seconds, lambda, Delta and epsilon drawn anew in training,

    p_t = lambda (t - mean(t) + Delta + epsilon_t)
    E(p)_2i = sin(omega_i p),  E(p)_2i+1 = cos(omega_i p),  omega_i = freq_scale 10000^(-2i/C)

Shape suffixes: B batch, S positions, C embedding.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class CAPE(nn.Module):
    """Embeddings (B, S, C) of the positions of padded utterances; without parameters.

    Args:
        dim: C, even.
        frame_seconds: between two positions.
        freq_scale: 30 for speech.
        global_shift: Delta is drawn from +-this many seconds, one an utterance.
        local_shift: epsilon is drawn from +-this part of ``frame_seconds``, one a position.
        global_scale: log lambda is drawn from +-log of this, one an utterance; 1 is off.

    Raises:
        ValueError: an odd dim, or a number out of range.
    """

    def __init__(
        self,
        dim: int,
        frame_seconds: float,
        freq_scale: float = 30.0,
        global_shift: float = 0.0,
        local_shift: float = 0.0,
        global_scale: float = 1.0,
    ) -> None:
        super().__init__()
        if dim % 2 or frame_seconds <= 0 or global_shift < 0 or local_shift < 0 or global_scale < 1:
            raise ValueError(
                f"CAPE: dim {dim} must be even, frame_seconds {frame_seconds} above 0, shifts {global_shift} and "
                f"{local_shift} not below 0, scale {global_scale} not below 1"
            )
        self.frame_seconds = frame_seconds
        self.freq_scale = freq_scale
        self.global_shift, self.local_shift, self.global_scale = global_shift, local_shift, global_scale
        self.dim = dim

    def forward(self, padding_mask: Tensor) -> Tensor:
        """(B, S), True at padding -> (B, S, C) float32; padding has no part in the centre."""
        times = self.augment(self.centred_times(padding_mask))
        exponents = torch.arange(0, self.dim, 2, device=times.device) / self.dim
        omega = self.freq_scale * torch.exp(-math.log(10000) * exponents)
        phases = times[..., None] * omega
        return torch.stack([phases.sin(), phases.cos()], dim=-1).flatten(-2)

    def centred_times(self, padding_mask: Tensor) -> Tensor:
        """(B, S) seconds from the middle of each utterance, whichever side its padding is on."""
        real = ~padding_mask
        times = self.frame_seconds * (real.cumsum(dim=1) - 1.0)
        return times - self.frame_seconds * (real.sum(dim=1, keepdim=True) - 1) / 2

    def augment(self, times: Tensor) -> Tensor:
        """Shift and stretch times (B, S), in training."""
        if not self.training:
            return times
        if self.global_shift:
            times = times + _uniform(times[:, :1], self.global_shift)
        if self.local_shift:
            times = times + _uniform(times, self.local_shift * self.frame_seconds)
        if self.global_scale > 1:
            times = times * _uniform(times[:, :1], math.log(self.global_scale)).exp()
        return times

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, frame_seconds={self.frame_seconds}, freq_scale={self.freq_scale}, global_shift="
            f"{self.global_shift}, local_shift={self.local_shift}, global_scale={self.global_scale}"
        )


def _uniform(like: Tensor, limit: float) -> Tensor:
    """Numbers from [-limit, limit) of the shape of ``like``."""
    return limit * (2 * torch.rand_like(like) - 1)
