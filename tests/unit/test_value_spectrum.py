"""Value spectra: W_V W_O has its eigenvalues and gradients, through everything that moves weights."""

import copy

import pytest
import torch
from torch import nn

from speech_mt.checkpoint.averaging import average_checkpoints
from speech_mt.checkpoint.folding import fold_checkpoint
from speech_mt.diagnostics.oversmoothing import (
    asymmetry,
    dominating_share,
    high_to_low_frequency,
    value_output_eigenvalues,
    value_output_matrix,
)
from speech_mt.errors import InputError
from speech_mt.modules.attention import MultiheadAttention
from speech_mt.modules.residual import deepnorm_alpha_beta
from speech_mt.reparam import BASES, ValueSpectrum, fold, fold_state_dict, sigma_reparam, value_spectrum, weight_norm
from speech_mt.reparam.value_spectrum import _InverseTransposed, _Orthogonal, _qr, _solve_identity

from .test_folding import checkpoint, stock, trained

D, H = 12, 3


class Stack(nn.Module):
    def __init__(self, layers=1, **options):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"self_attn": MultiheadAttention(D, H, **options)}) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["self_attn"](x)[0]
        return x


def controlled(spectrum="sharpen", basis="orthogonal", layers=1, **options):
    """A stack, and the ValueSpectrum of its first layer with different eigenvalues, none of them clamped."""
    torch.manual_seed(0)
    stack = Stack(layers, **options)
    value_spectrum(stack, spectrum, basis)
    state = stack.layers[0]["self_attn"].value_spectrum
    state.psi.data.copy_(torch.linspace(0.3, 0.95, D))
    if basis == "general":
        state.v.data.add_(0.2 * torch.randn(D, D))
    return stack, state


def weights(stack, layer=0):
    attention = stack.layers[layer]["self_attn"]
    return attention.v_proj.weight, attention.out_proj.weight


def parameters_of(model):
    return [name for name, p in model.named_parameters() if "value_spectrum" in name]


# -- what H is ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", BASES)
def test_a_constant_spectrum_of_minus_a_third_is_minus_a_third_of_the_identity(basis):
    stack, state = controlled(basis=basis)
    state.psi.data.fill_(3**-0.5)
    torch.testing.assert_close(value_output_matrix(*weights(stack)), -torch.eye(D) / 3, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("spectrum", "sign"), [("smooth", 1), ("sharpen", -1)])
@pytest.mark.parametrize("basis", BASES)
def test_the_eigenvalues_of_h_are_those_of_psi_in_order_of_heads(basis, spectrum, sign):
    stack, state = controlled(spectrum, basis)
    expected = sign * state.psi.detach().square()
    assert torch.equal(state.eigenvalues(), expected)
    matrix = value_output_matrix(*weights(stack)).double()
    found = torch.linalg.eigvals(matrix)
    assert found.imag.abs().max() < 1e-5
    torch.testing.assert_close(found.real.sort()[0].float(), expected.sort()[0], atol=1e-5, rtol=1e-4)
    of_heads = value_output_eigenvalues(*weights(stack), H).real.sort(1)[0].float()
    torch.testing.assert_close(of_heads, expected.view(H, -1).sort(1)[0], atol=1e-5, rtol=1e-4)
    assert (asymmetry(matrix) < 1e-6) == (basis == "orthogonal")


@pytest.mark.parametrize("basis", BASES)
def test_h_is_v_diag_l_inverse_v_and_not_diagonal(basis):
    """V must not cancel: an output weight of diag(l) V^-T for x W^T would leave H = diag(l)."""
    stack, state = controlled(basis=basis)
    v = state.basis()[0].detach().double()
    expected = v @ torch.diag(state.eigenvalues().detach().double()) @ torch.linalg.inv(v)
    matrix = value_output_matrix(*weights(stack)).double()
    torch.testing.assert_close(matrix, expected, atol=1e-5, rtol=1e-4)
    assert (matrix - torch.diag(matrix.diagonal())).abs().max() > 0.05


def test_sharpening_stops_at_minus_1_and_smoothing_does_not_stop():
    for spectrum, expected in (("sharpen", -1.0), ("smooth", 9.0)):
        _, state = controlled(spectrum)
        state.psi.data.fill_(3.0)
        assert torch.equal(state.eigenvalues(), torch.full((D,), expected))


def test_values_and_output_are_those_of_the_weights_and_biases_stay():
    stack, _ = controlled()
    attention = stack.layers[0]["self_attn"]
    attention.out_proj.bias.data.normal_()
    x = torch.randn(2, 5, D)
    torch.testing.assert_close(
        attention.out_proj(attention.v_proj(x)) - attention.out_proj.bias,
        x @ value_output_matrix(*weights(stack)) + attention.v_proj.bias @ weights(stack)[1].mT,
        atol=1e-5,
        rtol=1e-4,
    )


def test_initial_eigenvalues_have_a_mean_of_a_third_times_the_scale_squared():
    torch.manual_seed(0)
    for scale in (1.0, 0.5):
        state = ValueSpectrum(512, -1, scale=scale)
        assert state.eigenvalues().mean().item() == pytest.approx(-(scale**2) / 3, rel=0.1)
        assert state.eigenvalues().min() >= -(scale**2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("spectrum", ["smooth", "sharpen"])
def test_the_simplified_model_smooths_or_does_not(spectrum, causal):
    """X <- X + A X H, normalised, again and again: tokens become alike under + and stay different under -."""
    stack, _ = controlled(spectrum)
    matrix = value_output_matrix(*weights(stack)).double()
    torch.manual_seed(1)
    logits = torch.randn(16, 16, dtype=torch.double)
    if causal:
        logits = logits.masked_fill(torch.ones(16, 16).triu(1).bool(), -torch.inf)
    attention, x = logits.softmax(-1), torch.randn(16, D, dtype=torch.double)
    for _ in range(600):
        x = x + attention @ x @ matrix
        x = x / x.norm()
    hfc = torch.linalg.vector_norm(x - x.mean(0)) / torch.linalg.vector_norm(x.mean(0).expand(16, -1))
    assert (hfc < 1e-6) if spectrum == "smooth" else (hfc > 0.1)
    if not causal:
        torch.testing.assert_close(high_to_low_frequency(x[None])[0].double(), hfc, atol=1e-6, rtol=1e-4)
    eigenvalues = value_output_eigenvalues(*weights(stack), H)
    share = dominating_share(eigenvalues, attention.expand(1, H, 16, 16), causal=causal)
    winner = share.smoothing if spectrum == "smooth" else share.sharpening
    torch.testing.assert_close(winner, torch.ones(H))


def test_v_of_an_orthogonal_theta_is_theta_whatever_its_signs():
    """So it is the same on every device, and moves no further than Theta: values have a bias, and NeuTRENO's V0."""
    stack, state = controlled()
    attention = stack.layers[0]["self_attn"]
    attention.v_proj.bias.data.normal_()
    x, outputs = torch.randn(1, 4, D), []
    start = nn.init.orthogonal_(torch.empty(D, D))
    for angle in torch.linspace(0, 2 * torch.pi, 400):
        turn = torch.eye(D)
        turn[:2, :2] = torch.tensor([[angle.cos(), -angle.sin()], [angle.sin(), angle.cos()]])
        theta = turn @ start
        state.theta.data.copy_(theta)
        state._factors = None
        torch.testing.assert_close(state.basis()[0].detach(), theta, atol=1e-5, rtol=0)
        outputs.append(stack(x).detach())
    assert max((b - a).abs().max().item() for a, b in zip(outputs, outputs[1:], strict=False)) < 0.2


# -- gradients and when the factor is computed ------------------------------------------------------------------


def test_the_gradients_through_known_factors_are_those_of_qr_and_solve():
    torch.manual_seed(0)
    matrix = torch.randn(5, 5, dtype=torch.double, requires_grad=True)

    def orthogonal(x):
        return _Orthogonal.apply(x, *_qr(x.detach()))

    def inverse_transposed(x):
        return _InverseTransposed.apply(x, _solve_identity(x.detach()))

    for function in (orthogonal, inverse_transposed):
        assert torch.autograd.gradcheck(function, matrix)
        assert torch.autograd.gradgradcheck(function, matrix)


@pytest.fixture
def decompositions(monkeypatch):
    """Counts QR decompositions and solves of identity."""
    calls = []
    for name in ("_orthogonal", "_inverse"):
        original = getattr(ValueSpectrum, name)
        monkeypatch.setattr(ValueSpectrum, name, lambda self, x, f=original: calls.append(1) or f(self, x))
    return calls


@pytest.mark.parametrize("basis", BASES)
def test_one_decomposition_an_update_and_none_in_evaluation(decompositions, basis):
    stack, state = controlled(basis=basis)
    x = torch.randn(2, 5, D)
    for update in range(3):
        decompositions.clear()
        for _ in range(3):  # micro-batches
            state.set_num_updates(update)
            stack(x).square().sum().backward()
        assert len(decompositions) == 1
        state.matrix.data.add_(0.01 * torch.randn(D, D))  # as fairseq's optimizers do: no version counts it
    stack.eval()
    decompositions.clear()
    with torch.no_grad():
        first, second = stack(x), stack(x)
    assert len(decompositions) == 1
    assert torch.equal(first, second)
    factor = state.basis()[0].detach()
    expected = _qr(state.matrix)[0] if basis == "orthogonal" else state.matrix
    torch.testing.assert_close(factor, expected.detach())


@pytest.mark.parametrize("basis", BASES)
def test_an_optimizer_of_torch_needs_no_word(basis):
    stack, state = controlled(basis=basis)
    optimizer = torch.optim.SGD(stack.parameters(), 0.1)
    x = torch.randn(2, 5, D)
    before = weights(stack)[0].detach().clone()
    stack(x).square().sum().backward()
    optimizer.step()
    fresh = ValueSpectrum(D, -1, basis)
    fresh.load_state_dict(state.state_dict())
    assert not torch.allclose(weights(stack)[0], before)
    for one, other in zip(weights(stack), fresh.weights(), strict=True):
        torch.testing.assert_close(one, other)


def test_micro_batches_add_up_and_activation_checkpointing_changes_nothing(text_model, text_batch):
    gradients = []
    for checkpointing in (False, True):
        model = text_model(
            value_spectrum="sharpen",
            token_mixing="attn_scale,feat_scale,neutreno",
            checkpoint_activations=checkpointing,
        )
        for _ in range(2):
            model.set_num_updates(7)
            model(**text_batch["net_input"])[0].square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)
    assert all(gradients[0][name].abs().max() > 0 for name in gradients[0] if "psi" in name or "theta" in name)


@pytest.mark.parametrize(("basis", "what"), [("orthogonal", "Theta"), ("general", "V")])
def test_a_singular_matrix_is_one_message(basis, what):
    stack, state = controlled(basis=basis)
    state.matrix.data[:, 1] = state.matrix.data[:, 0]
    with pytest.raises(InputError, match=f"{what} is nearly singular"):
        stack(torch.randn(1, 2, D))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("basis", BASES)
def test_in_half_precision_theta_and_psi_stay_in_float32(dtype, basis):
    stack, state = controlled(basis=basis)
    x = torch.randn(2, 5, D)
    expected = stack(x)
    stack = stack.to(dtype)
    assert {state.psi.dtype, state.matrix.dtype} == {torch.float32}
    out = stack(x.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, atol=0.1, rtol=0.05)
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in stack.parameters())
    fold(stack)
    assert {p.dtype for p in stack.parameters()} == {dtype}


# -- which layers, and what refuses it ----------------------------------------------------------------------------


def test_the_first_half_of_each_stack_sharpens_and_the_rest_is_free(text_model):
    model = text_model(value_spectrum="sharpen-first-half", encoder_layers=5, decoder_layers=4)
    found = [name for name, child in model.named_modules() if isinstance(child, ValueSpectrum)]
    assert found == [
        f"{stack}.layers.{i}.self_attn.value_spectrum" for stack in ("encoder", "decoder") for i in range(2)
    ]
    assert all(model.get_submodule(name).sharpens for name in found)


def test_free_is_the_model_without(text_model):
    plain, free = text_model(), text_model(value_spectrum="free")
    assert plain.state_dict().keys() == free.state_dict().keys()
    assert all(torch.equal(value, free.state_dict()[name]) for name, value in plain.state_dict().items())


def test_parameters_of_an_attention_without_biases_are_three_squares_and_a_vector():
    stack = Stack(bias=False)
    assert sum(p.numel() for p in stack.parameters()) == 4 * D * D
    value_spectrum(stack, "sharpen")
    assert sum(p.numel() for p in stack.parameters()) == 3 * D * D + D


def test_the_same_matrix_cannot_have_two_controls():
    for first, second in ((sigma_reparam, "value"), (weight_norm, "value"), ("value", sigma_reparam)):
        stack = Stack()
        apply = {"value": lambda module: value_spectrum(module, "sharpen")}
        apply.get(first, first)(stack)
        with pytest.raises(ValueError, match=r"(v_proj|out_proj)\.weight is already parametrised"):
            apply.get(second, second)(stack)
    with pytest.raises(ValueError, match=r"no layers\.N\.self_attn"):
        value_spectrum(MultiheadAttention(D, H), "sharpen")
    with pytest.raises(ValueError, match="choose of"):
        value_spectrum(Stack(), "smoothest")


def test_sigma_reparam_takes_the_other_matrices(text_model, text_batch):
    model = text_model(reparam="sigma", value_spectrum="smooth", value_basis="general")
    gammas = {name: p.numel() for name, p in model.named_parameters() if name.endswith("gamma")}
    assert set(gammas.values()) == {4, 8}  # 6 and 10 without W_V and W_O of self-attention
    model.eval()
    before = model(**text_batch["net_input"])[0]
    folded = text_model()
    folded.load_state_dict(fold_state_dict(model.state_dict()))
    torch.testing.assert_close(folded.eval()(**text_batch["net_input"])[0], before, atol=1e-5, rtol=1e-4)


def test_deepnorm_scales_psi(text_model):
    model = text_model(value_spectrum="smooth", norm_placement="deepnorm", encoder_embed_dim=128)
    for stack, decoder in ((model.encoder, False), (model.decoder, True)):
        beta = deepnorm_alpha_beta(3, 3, decoder)[1]
        psi = stack.layers[0].self_attn.value_spectrum.psi
        assert 0.9 * beta < psi.max() <= beta


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"value_spectrum": "sharpen", "norm_placement": "subln"}, "subln has a LayerNorm between the two"),
        ({"value_basis": "general"}, "--value-basis general belongs to --value-spectrum"),
        ({"value_spectrum": "smooth", "reparam": "sigma", "reparam_from": "x.pt"}, "--reparam-from starts from plain"),
    ],
)
def test_what_cannot_mean_anything_is_refused(text_model, options, message):
    with pytest.raises(InputError, match=message):
        text_model(**options)


# -- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("placement", ["post", "pre", "deepnorm", "none", "sandwich"])
def test_folding_for_generation_keeps_the_scores(text_model, text_batch, placement, basis):
    model = trained(text_model(norm_placement=placement, value_spectrum="sharpen", value_basis=basis), text_batch)
    before = model(**text_batch["net_input"])[0]
    model.make_generation_fast_()
    assert not parameters_of(model)
    assert torch.equal(model(**text_batch["net_input"])[0], before)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("spectrum", ["smooth", "sharpen", "sharpen-first-half"])
def test_a_folded_checkpoint_is_stock_fairseqs(text_model, text_batch, task, spectrum, basis):
    options = {"value_spectrum": spectrum, "value_basis": basis}
    model = trained(text_model(**options), text_batch)
    folded, reasons = fold_checkpoint(checkpoint(model, **options))
    assert reasons == []
    assert not [key for key in folded["cfg"]["model"] if key.startswith(("value_", "token_", "neutreno"))]
    plain = stock(folded["cfg"]["model"], task)
    plain.load_state_dict(folded["model"])
    real = text_batch["target"] != 1
    scores = [m(**text_batch["net_input"])[0][real] for m in (plain, model)]
    torch.testing.assert_close(*scores, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_keeps_theta_psi_and_the_sign(text_model, text_batch, tmp_path):
    model = trained(text_model(value_spectrum="sharpen"), text_batch)
    copy_of_it = text_model(value_spectrum="sharpen").eval()
    copy_of_it.load_state_dict(model.state_dict())
    expected = model(**text_batch["net_input"])[0]
    assert torch.equal(copy_of_it(**text_batch["net_input"])[0], expected)
    assert torch.equal(copy.deepcopy(model)(**text_batch["net_input"])[0], expected)
    with pytest.raises(InputError, match="the checkpoint sharpens, the model smooths"):
        text_model(value_spectrum="smooth").load_state_dict(model.state_dict())
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    for path in paths:
        torch.save({"model": model.state_dict(), "cfg": {}}, path)
    average = average_checkpoints(paths)["model"]
    assert {name: value.shape for name, value in average.items()} == {
        name: value.shape for name, value in model.state_dict().items()
    }
    copy_of_it.load_state_dict(average)
    torch.testing.assert_close(copy_of_it(**text_batch["net_input"])[0], expected)


def test_a_half_precision_speech_checkpoint_folds_to_its_own_precision(ctc_model, speech_batch):
    """With queries and keys fused, and no biases: the other weights tell the precision."""
    options = {"fuse_qk": True, "no_bias": True}
    model = ctc_model(value_spectrum="sharpen", **options).half()
    folded = fold_state_dict(model.state_dict())
    assert {value.dtype for name, value in folded.items() if "proj.weight" in name} == {torch.float16}
    plain = ctc_model(**options).half().eval()
    plain.load_state_dict(folded)
    inputs = speech_batch["net_input"]
    outputs = [m.eval()(inputs["src_tokens"], inputs["src_lengths"])["encoder_out"] for m in (plain, model)]
    torch.testing.assert_close(*outputs, atol=2e-2, rtol=1e-2)
    fold(model)
    assert torch.equal(model(inputs["src_tokens"], inputs["src_lengths"])["encoder_out"], outputs[1])
