"""Strided convolutions with GLU that shorten speech features before the encoder.

Kernels 5, 5 and strides 2, 2 are fairseq's S2T front end (arXiv 2010.05171); kernel 7, stride 3 is the sigmaReparam
speech model's (arXiv 2303.06296).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from speech_mt.errors import InputError


class ConvFrontend(nn.Module):
    """(B, T, features) -> (B, ceil(T / stride) per layer, out_channels).

    Args:
        in_channels: features of a frame.
        mid_channels: channels of the inner convolutions, before GLU halves them.
        out_channels: width of the result.
        kernel_sizes, strides: of each convolution, in order.

    Raises:
        InputError: the lists are empty, of different lengths or not positive; or mid_channels is odd.
    """

    def __init__(
        self,
        in_channels: int,
        mid_channels: int,
        out_channels: int,
        kernel_sizes: Sequence[int],
        strides: Sequence[int],
    ) -> None:
        super().__init__()
        if not kernel_sizes or len(kernel_sizes) != len(strides) or min(*kernel_sizes, *strides) < 1:
            raise InputError(
                f"convolution kernel sizes {list(kernel_sizes)} and strides {list(strides)}: give as many of each, "
                "all at least 1"
            )
        if mid_channels < 2 or mid_channels % 2:
            raise InputError(f"{mid_channels} convolution channels: GLU halves them, so give an even number")
        self.strides = tuple(strides)
        last = len(kernel_sizes) - 1
        self.conv_layers = nn.ModuleList(
            nn.Conv1d(
                in_channels if i == 0 else mid_channels // 2,
                mid_channels if i < last else out_channels * 2,
                kernel,
                stride=stride,
                padding=kernel // 2,
            )
            for i, (kernel, stride) in enumerate(zip(kernel_sizes, strides, strict=True))
        )

    @property
    def stride(self) -> int:
        """Frames in for one frame out."""
        return math.prod(self.strides)

    def out_lengths(self, lengths: Tensor) -> Tensor:
        """(B,) frames in -> (B,) frames out."""
        for conv in self.conv_layers:
            lengths = _out_lengths(conv, lengths)
        return lengths

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """(B, T, features), (B,) frames -> (B, T', out_channels), (B,) frames.

        Frames beyond an utterance's length are zeroed before each convolution, so that an utterance gives the same
        result alone and padded in a batch.
        """
        x = x.transpose(1, 2).to(self.conv_layers[0].weight.dtype)  # fairseq-generate --fp16 leaves the input float32
        for conv in self.conv_layers:
            x = _zero_padding(x, lengths)
            x = F.glu(conv(x), dim=1)
            lengths = _out_lengths(conv, lengths)
        return x.transpose(1, 2), lengths


def _out_lengths(conv: nn.Conv1d, lengths: Tensor) -> Tensor:
    return (lengths + 2 * conv.padding[0] - conv.kernel_size[0]) // conv.stride[0] + 1


def _zero_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """(B, C, T) with the frames from lengths on set to 0."""
    padding = torch.arange(x.shape[-1], device=x.device) >= lengths[:, None]
    return x.masked_fill(padding[:, None, :], 0.0)
