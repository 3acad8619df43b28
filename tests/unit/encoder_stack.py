"""A stack of encoder layers that needs no fairseq, for the tests of what watches layers."""

import torch
from torch import nn

from speech_mt.modules.layers import EncoderLayer, LayerConfig


class EncoderStack(nn.Module):
    """Three encoder layers of width 16, from seed 1."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.encoder = nn.Module()
        cfg = LayerConfig(16, 32, 4, 3, **options)
        self.encoder.layers = nn.ModuleList(EncoderLayer(cfg) for _ in range(3))

    def forward(self, x, padding_mask=None):
        for layer in self.encoder.layers:
            x = layer(x, padding_mask)
        return x
