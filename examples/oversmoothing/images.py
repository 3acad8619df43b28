"""Handwritten digits (8 x 8 pixels, 1,797 images, from scikit-learn) by a ViT-Ti of patches of 2 x 2.

python examples/oversmoothing/images.py --control "sharpen first half" --layers 24
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from controls import CONTROLS
from torch import Tensor

from speech_mt.errors import InputError, run
from speech_mt.models.image_encoder import ImageClassifier
from speech_mt.optim.weight_decay import split_groups
from speech_mt.reparam import power_step

IMAGE = {"classes": 10, "image_size": 8, "patch_size": 2}
BATCH, LEARNING_RATE, WEIGHT_DECAY = 64, 5e-4, 0.05
TEST = 360  # images
INTERVAL = 10  # updates between two points of a curve


@dataclass(frozen=True)
class Images:
    """(N, 1, 8, 8) float32 of mean 0 and deviation 1, and (N,) classes."""

    pixels: Tensor
    classes: Tensor


def load_digits(share: float = 1.0, seed: int = 1) -> tuple[Images, Images]:
    """Training and test set; ``share`` of the training set, chosen by ``seed``. The test set is always the same.

    Raises:
        InputError: scikit-learn is not installed, or no share of a set.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError:
        raise InputError("scikit-learn is not installed: pip install 'speech_mt[oversmoothing]'") from None
    if not 0 < share <= 1:
        raise InputError(f"a share of {share:g} of the training set: give one above 0, at most 1")
    digits = load()
    pixels = torch.from_numpy(digits.images).float()[:, None]
    pixels = (pixels - pixels.mean()) / pixels.std()
    classes = torch.from_numpy(digits.target)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(classes)))
    test, train = order[:TEST], order[TEST:]
    train = train[torch.from_numpy(np.random.default_rng(seed).permutation(len(train)))[: round(share * len(train))]]
    return Images(pixels[train], classes[train]), Images(pixels[test], classes[test])


def train(
    model: ImageClassifier,
    images: Images,
    updates: int,
    seed: int,
    see: Callable[[int, float], None] | None = None,
    learning_rate: float = LEARNING_RATE,
) -> float:
    """AdamW, linear warm-up over a tenth of the updates, then linear decay to 0; the mean loss of the last interval.

    ``see(update, loss)`` is called every :data:`INTERVAL` updates.
    """
    optimizer = torch.optim.AdamW(split_groups(list(model.parameters())), learning_rate, weight_decay=WEIGHT_DECAY)
    warmup = max(1, updates // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / warmup, (updates - done) / max(1, updates - warmup))
    )
    losses: list[float] = []
    model.train()
    for update, batch in zip(range(1, updates + 1), batches(len(images.classes), seed), strict=False):
        power_step(model)
        loss = F.cross_entropy(model(images.pixels[batch]), images.classes[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if see is not None and update % INTERVAL == 0:
            see(update, float(np.mean(losses[-INTERVAL:])))
    return float(np.mean(losses[-INTERVAL:]))


def batches(count: int, seed: int) -> Iterator[Tensor]:
    """Shuffled batches, epoch after epoch."""
    random = np.random.default_rng(seed)
    while True:
        yield from torch.from_numpy(random.permutation(count)).split(BATCH)


@torch.no_grad()
def accuracy(model: ImageClassifier, images: Images) -> float:
    """Percent."""
    model.eval()
    return 100 * (model(images.pixels).argmax(-1) == images.classes).float().mean().item()


def with_noise(images: Images, deviation: float) -> Images:
    """Gaussian noise on every pixel, in deviations of the pixels."""
    noise = np.random.default_rng(0).standard_normal(images.pixels.shape, dtype=np.float32)
    return Images(images.pixels + deviation * torch.from_numpy(noise), images.classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", choices=list(CONTROLS), default="stock", metavar="NAME", help=", ".join(CONTROLS))
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--updates", type=int, default=600)
    parser.add_argument("--share", type=float, default=1.0, help="of the training set")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    training, test = load_digits(args.share, args.seed)
    torch.manual_seed(args.seed)
    model = CONTROLS[args.control].image_classifier(args.layers, **IMAGE)
    train(model, training, args.updates, args.seed, lambda update, loss: print(f"{update:5} loss {loss:.3f}"))
    print(f"{args.control}, {args.layers}L: {accuracy(model, test):.1f} % of {len(test.classes)} test images")


if __name__ == "__main__":
    run(main)
