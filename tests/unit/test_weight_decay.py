"""Marked parameters are not decayed, whatever optimizer of fairseq's decays the rest."""

from types import SimpleNamespace

import pytest
import torch
from fairseq import optim
from fairseq.optim.adam import FairseqAdamConfig
from fairseq.optim.sgd import SGD  # noqa: F401  (registers it)
from omegaconf import OmegaConf
from torch import nn

from speech_mt.errors import InputError
from speech_mt.optim.weight_decay import exclude_from_weight_decay, install, is_excluded, split_groups


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """As user_dir does; undone afterwards."""
    stock = optim.FP16Optimizer.__dict__["build_optimizer"]
    monkeypatch.setattr(optim, "build_optimizer", optim.build_optimizer)
    install()
    yield
    optim.FP16Optimizer.build_optimizer = stock


def config(**options):
    cfg = OmegaConf.structured(FairseqAdamConfig(weight_decay=0.5, lr=[0.1], tpu=False))
    OmegaConf.set_struct(cfg, False)
    return OmegaConf.merge(cfg, {"_name": "adam", **options})


def parameters():
    decayed, kept = (nn.Parameter(torch.ones(3)) for _ in range(2))
    exclude_from_weight_decay(kept)
    return decayed, kept


def test_only_unmarked_parameters_are_decayed():
    decayed, kept = parameters()
    optimizer = optim.build_optimizer(config(), [decayed, kept])
    optimizer.set_lr(0.1)
    for parameter in (decayed, kept):
        parameter.grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(kept.data, torch.ones(3))
    torch.testing.assert_close(decayed.data, torch.full((3,), 0.95))


def test_without_a_mark_all_is_as_in_stock_fairseq():
    plain = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2), requires_grad=False)]
    assert split_groups(plain) == plain[:1]
    assert len(optim.build_optimizer(config(), plain).param_groups) == 1


def test_joined_half_precision_parameters_are_refused():
    common = SimpleNamespace(fp16_no_flatten_grads=False)
    cfg = SimpleNamespace(common=common, optimizer=SimpleNamespace(weight_decay=0.5))
    with pytest.raises(InputError, match="--fp16-no-flatten-grads"):
        optim.FP16Optimizer.build_optimizer(cfg, list(parameters()))


def test_models_mark_theta_psi_and_scales(text_model):
    model = text_model(value_spectrum="sharpen", token_mixing="attn_scale,feat_scale")
    marked = {name.rpartition("self_attn.")[2] for name, p in model.named_parameters() if is_excluded(p)}
    assert marked == {
        "value_spectrum.theta",
        "value_spectrum.psi",
        "attn_scale.weight",
        "feat_scale.low",
        "feat_scale.high",
    }
