"""LARS: steps in proportion to each weight's norm; and what fairseq's precisions do with the optimizers for speech."""

import copy
from argparse import Namespace

import pytest
import torch
from fairseq import optim
from fairseq.optim.fp16_optimizer import FP16Optimizer, MemoryEfficientFP16Optimizer
from omegaconf import OmegaConf

from speech_mt import compat
from speech_mt.optim.lars import LARS
from speech_mt.reparam import sigma_reparam


def parameter(values, gradient):
    p = torch.nn.Parameter(torch.tensor(values))
    p.grad = torch.tensor(gradient)
    return p


def test_a_step_by_hand():
    p = parameter([3.0, 4.0], [0.6, 0.8])  # norms 5 and 1
    optimizer = LARS([p], lr=0.1, momentum=0.5, trust_coefficient=0.01)
    optimizer.step()  # ratio 0.05, step 0.005 (0.6, 0.8)
    torch.testing.assert_close(p.detach(), torch.tensor([2.997, 3.996]))
    optimizer.step()  # norm 4.995: 0.004995 (0.6, 0.8) + half of the step before
    torch.testing.assert_close(p.detach(), torch.tensor([2.997 - 0.004497, 3.996 - 0.005996]))


def test_weight_decay_by_hand():
    p = parameter([3.0, 4.0], [0.6, 0.8])
    LARS([p], lr=1.0, momentum=0.0, trust_coefficient=0.01, weight_decay=0.2).step()
    # ratio 0.01 * 5 / (1 + 0.2 * 5) = 0.025; gradient with decay (0.6 + 0.6, 0.8 + 0.8)
    torch.testing.assert_close(p.detach(), torch.tensor([3.0 - 0.03, 4.0 - 0.04]))


def test_the_scale_of_a_gradient_plays_no_part():
    one, other = parameter([3.0, 4.0], [0.6, 0.8]), parameter([3.0, 4.0], [600.0, 800.0])
    for p in (one, other):
        LARS([p], lr=0.1).step()
    torch.testing.assert_close(one.detach(), other.detach())


def test_zeros_move_by_the_plain_rate_and_no_gradient_moves_nothing():
    zero, still = parameter([0.0, 0.0], [1.0, -2.0]), parameter([1.0, 2.0], [0.0, 0.0])
    unused = torch.nn.Parameter(torch.ones(2))
    LARS([zero, still, unused], lr=0.1).step()
    torch.testing.assert_close(zero.detach(), torch.tensor([-0.1, 0.2]))
    assert still.tolist() == [1.0, 2.0]
    assert unused.tolist() == [1.0, 1.0]


def test_a_restored_state_goes_on_as_the_uninterrupted_one():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = LARS(model.parameters(), lr=0.5)

    def steps(model, optimizer, count):
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).square().sum().backward()
            optimizer.step()

    steps(model, optimizer, 2)
    twin = copy.deepcopy(model)
    restored = LARS(twin.parameters(), lr=0.5)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    steps(model, optimizer, 2)
    steps(twin, restored, 2)
    assert torch.equal(model.weight, twin.weight)


def test_numbers_below_0_are_refused():
    with pytest.raises(ValueError, match="momentum is -1"):
        LARS([torch.nn.Parameter(torch.ones(1))], lr=0.1, momentum=-1)


# -- fairseq: every optimizer, every precision ----------------------------------------------------------------------

OPTIMIZERS = {
    "adam": {"adam_betas": "(0.9, 0.98)", "adam_eps": 1e-8, "weight_decay": 0.0, "use_old_adam": False,
             "fp16_adam_stats": False, "tpu": False, "lr": [0.01]},
    "lars": {"momentum": 0.9, "trust_coefficient": 0.1, "weight_decay": 0.0, "lr": [0.1]},
    "adagrad": {"weight_decay": 0.0, "lr": [0.01]},
    "sgd": {"momentum": 0.0, "weight_decay": 0.0, "lr": [0.1]},
}  # fmt: skip
PRECISIONS = {
    "float32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True, "fp16_no_flatten_grads": True},
    "memory_efficient_bf16": {"bf16": True, "memory_efficient_bf16": True},
}


def build(name, precision, model):
    """The optimizer as fairseq's trainer builds it."""
    options = {"_name": name} | OPTIMIZERS[name]
    settings = OmegaConf.create(options) if name in ("adam", "lars") else Namespace(optimizer=name, **options)
    common = {"fp16_init_scale": 4, "fp16_scale_tolerance": 0.0, "threshold_loss_scale": None, "min_loss_scale": 1e-4,
              "fp16_scale_window": 128, "bf16": False} | PRECISIONS[precision]  # fmt: skip
    cfg = Namespace(common=Namespace(**common), optimizer=settings)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if precision == "float32":
        return optim.build_optimizer(settings, parameters)
    if precision.startswith("memory_efficient"):
        return MemoryEfficientFP16Optimizer.build_optimizer(cfg, parameters)
    return FP16Optimizer.build_optimizer(cfg, parameters)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_lower_the_loss_in_every_precision_that_fairseq_gives_them(name, precision):
    if precision.startswith("memory_efficient") and name != "adam":
        pytest.skip(f"fairseq refuses --memory-efficient-bf16 with {name}")
    compat.apply()
    torch.manual_seed(0)
    model = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))])
    sigma_reparam(model)
    half = {"bf16": torch.bfloat16, "memory_efficient_bf16": torch.bfloat16, "fp16": torch.float16}
    model.to(half.get(precision, torch.float32))
    optimizer = build(name, precision, model)
    x, losses = torch.randn(16, 6), []
    y = x.sum(dim=1, keepdim=True)
    for _ in range(12):
        optimizer.zero_grad()
        loss = (model[0](x.to(model[0][0].bias.dtype)).float() - y).square().mean()
        optimizer.backward(loss)
        norm = optimizer.clip_grad_norm(1.0)
        assert torch.as_tensor(norm).isfinite()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.98 * losses[0]


def test_lars_does_not_take_flat_parameters():
    """fairseq then asks for --fp16-no-flatten-grads on a GPU (on CPUs the plugin keeps weights apart anyway)."""
    assert not build("lars", "float32", torch.nn.Linear(2, 2)).supports_flat_params
