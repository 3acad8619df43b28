"""What a depth will need: parameters, memory, operations and hours, before any GPU is rented.

    python examples/wmt_en_de/plan.py                                       the recipes of run.sh, 8 A100
    python examples/wmt_en_de/plan.py --depths 100 --gpus 2 --utilisation 0.4 --method deepnorm_sigma_reparam

All of it is computed, nothing measured on a GPU: the hours are operations over --utilisation times the peak, and that
share is an assumption of yours. The count of saved activations is exact for this plugin's layers (a test compares it
with what autograd keeps on a CPU); attention is fused, so no attention matrix is among them.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from speech_mt.arguments import number, positive_int
from speech_mt.errors import InputError, run

GIB = 2**30
METHODS = sorted(path.stem for path in (Path(__file__).parent / "config" / "method").glob("*.yaml"))


@dataclass(frozen=True)
class Shape:
    """A spectral_transformer with tied embeddings; ``layers`` in the encoder and in the decoder."""

    layers: int
    dim: int = 512
    ffn: int = 2048
    heads: int = 8
    vocabulary: int = 32_000
    reparam: bool = False
    dropout: bool = True
    activation_dropout: bool = False
    recompute: bool = False

    @property
    def encoder_weights(self) -> int:
        """Weights of one encoder layer's linear maps, without biases."""
        return 4 * self.dim**2 + 2 * self.dim * self.ffn

    @property
    def decoder_weights(self) -> int:
        return 8 * self.dim**2 + 2 * self.dim * self.ffn

    @property
    def parameters(self) -> int:
        """All that is learned, gamma included."""
        encoder = self.encoder_weights + 5 * self.dim + self.ffn + 2 * 2 * self.dim + 6 * self.reparam
        decoder = self.decoder_weights + 9 * self.dim + self.ffn + 3 * 2 * self.dim + 10 * self.reparam
        return self.layers * (encoder + decoder) + self.vocabulary * self.dim


@dataclass(frozen=True)
class Batch:
    """One forward pass: tokens of both sides, padding included, and the mean length of a sentence in tokens."""

    source: int
    target: int
    length: float


def saved_bytes(shape: Shape, batch: Batch, element: int = 2, mask: int = 1) -> int:
    """Bytes that autograd keeps from the forward pass until the backward pass, weights not counted.

    Args:
        shape: the model. With ``recompute``, only the input of each layer is kept, and a layer at a time is computed
            again: its bytes are added once.
        batch: the forward pass.
        element: bytes of an activation: 2 in bf16 and fp16, 4 in float32. Statistics of LayerNorm and attention, and
            the log-probabilities, are float32.
        mask: bytes of an element of a dropout mask: 1 on a GPU, 4 on a CPU.
    """
    d, f, h, source, target = shape.dim, shape.ffn, shape.heads, batch.source, batch.target
    drop = mask * shape.dropout
    ffn = f * (element * (1 + shape.activation_dropout) + mask * shape.activation_dropout)
    # q, k, v, the attention's output, and the input and output of each LayerNorm; masks of the branches
    encoder = source * (d * (8 * element + 2 * drop) + ffn + 4 * (2 * 2 + h))
    # the same twice, but for k and v of the source
    decoder = target * (d * (12 * element + 3 * drop) + ffn + 4 * (3 * 2 + 2 * h)) + source * 2 * d * element
    reparametrised = shape.reparam * element * (shape.encoder_weights + shape.decoder_weights)  # W_hat
    if shape.recompute:
        layers = shape.layers * element * d * (source + target) + max(encoder, decoder) + reparametrised
    else:
        layers = shape.layers * (encoder + decoder + reparametrised)
    embedded = d * (source + target) * (element + drop) + 8 * (source + 2 * target)  # and token ids
    return layers + embedded + 4 * target * shape.vocabulary


def state_bytes(shape: Shape, mixed: bool = True) -> int:
    """Bytes of weights, gradients and Adam's two moments; ``mixed``: 16-bit ones beside float32 copies of both."""
    return shape.parameters * (20 if mixed else 16)


def update_flops(shape: Shape, batch: Batch) -> float:
    """Floating-point operations of forward and backward pass: two a multiply-add, the backward pass twice the forward.

    Recomputation is another forward pass through the layers. Causal attention counts half. Element-wise work and
    sigmaReparam's power step (two products of matrix and vector a weight) are left out: below 1 %.
    """
    d, source, target = shape.dim, batch.source, batch.target
    cross_weights = 2 * d**2  # keys and values of the source
    linear = shape.encoder_weights * source + (shape.decoder_weights - cross_weights) * target + cross_weights * source
    attention = 2 * d * batch.length * (source + target / 2 + target)  # Q K^T and A V; self, causal, cross
    layers = 2 * shape.layers * (linear + attention)
    return layers * (4 if shape.recompute else 3) + 3 * 2 * d * shape.vocabulary * target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=positive_int, nargs="+", default=[6, 18, 50, 100], metavar="N")
    parser.add_argument("--method", choices=METHODS, default="sigma_reparam", help="of run.sh, reparametrised or not")
    parser.add_argument("--gpus", type=positive_int, default=8)
    parser.add_argument("--tokens", type=positive_int, default=4096, help="of a side of a GPU's batch (default: 4096)")
    parser.add_argument("--length", type=number(1), default=30, help="tokens of a sentence (default: 30)")
    parser.add_argument("--vocabulary", type=positive_int, default=32_000)
    parser.add_argument("--updates", type=positive_int, default=100_000)
    parser.add_argument("--peak", type=number(1), default=312.0, help="TFLOP/s of a GPU (default: 312, A100 in bf16)")
    parser.add_argument("--utilisation", type=float, default=0.3, help="assumed share of the peak (default: 0.3)")
    args = parser.parse_args()
    if not 0 < args.utilisation <= 1:
        raise InputError(f"--utilisation {args.utilisation}: a share of the peak, above 0 and at most 1")

    print(f"{args.method}, {args.gpus} GPUs, {args.tokens:,} tokens of each side a GPU, {args.updates:,} updates")
    print("depth  batch    update-freq  parameters  state GiB  saved GiB  (recomputed)  TFLOP/update   hours")
    batch = Batch(args.tokens, args.tokens, args.length)
    for depth in args.depths:
        deep = depth >= 50
        total = 524_288 if deep else 32_768
        frequency = total / args.tokens / args.gpus
        if not frequency.is_integer():
            raise InputError(f"{total:,} tokens are no multiple of {args.tokens:,} on {args.gpus} GPUs: other --tokens")
        options = {"vocabulary": args.vocabulary, "reparam": "sigma" in args.method, "activation_dropout": not deep}
        plain, recomputed = (Shape(depth, **options, recompute=recompute) for recompute in (False, True))
        flops = update_flops(recomputed if deep else plain, batch) * frequency * args.gpus
        hours = flops * args.updates / (args.gpus * args.peak * 1e12 * args.utilisation) / 3600
        kept, again = (saved_bytes(shape, batch) / GIB for shape in (plain, recomputed))
        print(
            f"{depth:>4}L  {'huge' if deep else 'regular':<7}{int(frequency):>13}{plain.parameters / 1e6:>10.1f} M"
            f"{state_bytes(plain) / GIB:>11.1f}{kept:>11.1f}{again:>14.1f}{flops / 1e12:>14,.0f}{hours:>8,.1f}"
        )
    print(
        "state: weights, gradients, Adam. saved: activations until the backward pass; in brackets with\n"
        "--checkpoint-activations, whose second forward pass the hours of 50 layers and more include.\n"
        f"hours: at {args.utilisation:.0%} of {args.peak:g} TFLOP/s a GPU, which is assumed; small models reach less."
    )


if __name__ == "__main__":
    run(main)
