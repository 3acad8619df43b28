"""Which options make a checkpoint one of another model."""

from argparse import Namespace

import pytest
import torch

from speech_mt.checkpoint import average_checkpoints, save_checkpoint
from speech_mt.checkpoint.function_options import different_options
from speech_mt.errors import InputError

OURS = {
    "_name": "spectral_transformer",
    "norm_placement": "post",
    "reparam": "sigma",
    "attention_softcap": 0.0,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": None,
    "dropout": 0.1,
    "encoder_layers": 6,
}


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({}, ""),
        ({"norm_placement": "pre"}, "--norm-placement is pre, was post"),
        ({"attention_softcap": 50.0}, "--attention-softcap is 50, was 0"),
        ({"decoder_attention_heads": 8}, "--decoder-attention-heads is 8, was 4"),
        ({"decoder_attention_heads": 4}, ""),  # None means as in the encoder
        ({"dropout": 0.3, "encoder_layers": 12, "reparam_gamma_init": "one"}, ""),
        (
            {"norm_placement": "pre", "reparam": "none"},
            "--norm-placement is pre, was post; --reparam is none, was sigma",
        ),
    ],
)
def test_options_of_the_function_are_told_from_those_of_training(change, difference):
    assert different_options(OURS, OURS | change) == difference


def test_an_option_that_is_new_counts_against_its_default():
    new = OURS | {"token_mixing": "slow"}
    assert different_options(OURS, new) == ""
    assert different_options(OURS, new, {"token_mixing": "off"}) == "--token-mixing is slow, was off"


def test_stock_options_are_compared_with_ours():
    stock = Namespace(arch="transformer", encoder_normalize_before=True, encoder_attention_heads=4, lr=[1.0], seed=3)
    assert different_options(stock, OURS) == "--norm-placement is post, was pre"
    assert different_options(stock, OURS | {"norm_placement": "pre"}) == ""
    assert different_options(stock, Namespace(**(vars(stock) | {"lr": [2.0]}))) == ""


def test_only_one_model_can_be_averaged(tmp_path):
    paths = []
    for placement in ("post", "pre"):
        paths.append(tmp_path / f"{placement}.pt")
        cfg = {"model": OURS | {"norm_placement": placement}}
        save_checkpoint({"model": {"w": torch.ones(1)}, "cfg": cfg}, paths[-1])
    with pytest.raises(InputError, match=r"cannot average .*pre\.pt with .*post\.pt: --norm-placement is pre"):
        average_checkpoints(paths)
