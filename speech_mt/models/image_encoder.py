"""A Vision Transformer of the same layers: patches of an image as tokens (Dosovitskiy et al. 2021, arXiv 2010.11929).

In pure torch: a small bidirectional encoder without padding or text around it, to look at oversmoothing by itself.

Shape suffixes: B batch, P patches, C embedding.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from speech_mt.errors import InputError
from speech_mt.modules.layers import EncoderLayer, LayerConfig
from speech_mt.modules.residual import NORM_FIRST, init_gain
from speech_mt.optim.weight_decay import exclude_controls
from speech_mt.reparam import value_spectrum

VIT_TINY = LayerConfig(
    embed_dim=192, ffn_embed_dim=768, attention_heads=3, encoder_layers=12, norm_placement="pre", activation_fn="gelu"
)


class ImageEncoder(nn.Module):
    """Patches, learned positions and layers.

    Args:
        cfg: of the layers; ``encoder_layers`` of them.
        image_size: pixels of a side.
        patch_size: pixels of a patch's side; must divide ``image_size``.
        channels: of a pixel.

    Raises:
        InputError: the patches do not fill the image.
    """

    def __init__(self, cfg: LayerConfig, image_size: int, patch_size: int, channels: int = 1) -> None:
        super().__init__()
        if patch_size < 1 or image_size % patch_size:
            raise InputError(f"patches of {patch_size} pixels do not fill an image of {image_size}")
        self.patches = nn.Conv2d(channels, cfg.embed_dim, patch_size, stride=patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn((image_size // patch_size) ** 2, cfg.embed_dim))
        self.layers = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.encoder_layers))
        self.layer_norm = nn.LayerNorm(cfg.embed_dim) if cfg.norm_placement in NORM_FIRST else nn.Identity()

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, side, side) -> (B, P, C)."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        first_values = self.layers[0].first_values(x)
        for i, layer in enumerate(self.layers):
            x = layer(x, None, first_values if i else None)
        return self.layer_norm(x)


class ImageClassifier(nn.Module):
    """The mean over patches of an :class:`ImageEncoder`, and a linear layer to the classes.

    Args:
        spectrum, basis: of the value spectrum, see :func:`speech_mt.reparam.value_spectrum`.
        shape: of the layers; token mixing and norm placement are there.
    """

    def __init__(
        self,
        classes: int,
        image_size: int,
        patch_size: int,
        channels: int = 1,
        spectrum: str = "free",
        basis: str = "orthogonal",
        shape: LayerConfig = VIT_TINY,
    ) -> None:
        super().__init__()
        self.encoder = ImageEncoder(shape, image_size, patch_size, channels)
        self.head = nn.Linear(shape.embed_dim, classes)
        scale = init_gain(shape.norm_placement, shape.encoder_layers, 0, decoder=False)
        value_spectrum(self.encoder, spectrum, basis, scale)
        exclude_controls(self)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, side, side) -> (B, classes) scores."""
        return self.head(self.encoder(images).mean(1))


def vit_tiny(layers: int = 12, **options: object) -> LayerConfig:
    """ViT-Ti's layers (width 192, 3 heads, feed-forward 768, pre-LN), ``layers`` of them, with further options."""
    return replace(VIT_TINY, encoder_layers=layers, **options)
