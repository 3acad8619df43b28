"""The image encoder: ViT-Ti's shape, the layers of the other models, and that it learns scikit-learn's digits."""

import sys
from pathlib import Path

import pytest
import torch

from speech_mt.errors import InputError
from speech_mt.models.image_encoder import ImageClassifier, ImageEncoder, vit_tiny
from speech_mt.modules.layers import EncoderLayer, LayerConfig
from speech_mt.optim.weight_decay import is_excluded
from speech_mt.reparam import ValueSpectrum, fold, power_step

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "oversmoothing"))

import images  # noqa: E402
from controls import CONTROLS  # noqa: E402

SMALL = LayerConfig(embed_dim=32, ffn_embed_dim=64, attention_heads=2, encoder_layers=3, norm_placement="pre")


@pytest.mark.parametrize(("layers", "millions"), [(12, 5.34), (24, 10.68)])
def test_vit_tinys_layers_have_vit_tinys_parameters(layers, millions):
    """444,864 a layer of width 192: 12 d^2 of matrices, 13 d of biases and LayerNorms."""
    with torch.device("meta"):
        encoder = ImageEncoder(vit_tiny(layers), 224, 16, channels=3)
    assert sum(p.numel() for p in encoder.layers.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)
    assert encoder.positions.shape == (196, 192)
    assert {layer.self_attn.num_heads for layer in encoder.layers} == {3}


def test_patches_are_tokens_in_rows():
    encoder = ImageEncoder(SMALL, 4, 2)
    encoder.layers = torch.nn.ModuleList([EncoderLayer(SMALL)])
    seen = []
    encoder.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    image = torch.zeros(1, 1, 4, 4)
    image[..., 2:, :2] = 1.0  # the patch below the first
    encoder(image)
    encoder(torch.zeros(1, 1, 4, 4))
    changed = (seen[0] - seen[1]).abs().amax(-1)[0] > 0
    assert changed.tolist() == [False, False, True, False]


def test_patches_have_to_fill_the_image():
    with pytest.raises(InputError, match="patches of 3 pixels do not fill an image of 8"):
        ImageEncoder(SMALL, 8, 3)


@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_trains_and_folds(control):
    torch.manual_seed(0)
    model = CONTROLS[control].image_classifier(3, **images.IMAGE)
    spectra = [name for name, module in model.named_modules() if isinstance(module, ValueSpectrum)]
    expected = {"free": 0, "sharpen-first-half": 1}.get(CONTROLS[control].spectrum, 3)
    assert len(spectra) == expected
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([1, 2, 3, 4])
    power_step(model)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    assert all(p.grad is not None for p in model.parameters())
    assert all(is_excluded(p) for name, p in model.named_parameters() if "value_spectrum" in name or "_scale" in name)
    model.eval()
    before = model(x)
    fold(model)
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)


def test_it_learns_handwritten_digits():
    pytest.importorskip("sklearn", reason="scikit-learn, an extra, is not installed")
    training, test = images.load_digits()
    assert (len(training.classes), len(test.classes)) == (1437, 360)
    torch.manual_seed(1)
    model = ImageClassifier(10, 8, 2, spectrum="sharpen-first-half", shape=SMALL)
    before = images.accuracy(model, test)
    images.train(model, training, 200, seed=1, learning_rate=4e-3)
    assert images.accuracy(model, test) > 80 > 30 > before
    assert images.accuracy(model, images.with_noise(test, 10.0)) < 60


def test_a_share_of_the_training_set_is_a_part_of_it_and_the_test_set_stays():
    pytest.importorskip("sklearn", reason="scikit-learn, an extra, is not installed")
    (whole, test), (tenth, same_test) = images.load_digits(), images.load_digits(0.1)
    assert len(tenth.classes) == 144
    assert torch.equal(whole.pixels[:144], tenth.pixels)
    assert torch.equal(test.pixels, same_test.pixels)
    with pytest.raises(InputError, match="a share of 0"):
        images.load_digits(0.0)
