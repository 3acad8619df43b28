"""sigmaReparam: the formula, its gradient, and its state under what PyTorch does to modules."""

import copy

import pytest
import torch
from torch import nn

from speech_mt.reparam import fold, power_step, sigma, sigma_reparam, states


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class Model(nn.Module):
    def __init__(self, dim=16, layers=3):
        super().__init__()
        self.embedding = nn.Embedding(7, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.output = nn.Linear(dim, 7, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


TOKENS = torch.tensor([0, 3, 5, 6])


def model(dtype=torch.float32, **options):
    torch.manual_seed(0)
    net = Model().to(dtype)
    sigma_reparam(net, **options)
    return net


def norm(weight):
    return torch.linalg.matrix_norm(weight.detach().float(), 2).item()


def train(net, updates, lr=0.1):
    optimizer = torch.optim.SGD(net.parameters(), lr)
    for _ in range(updates):
        power_step(net)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(TOKENS), TOKENS).backward()
        optimizer.step()


def test_spectral_norm_is_gamma():
    net = model(svd=True)
    for layer in net.layers:
        layer.sigma_reparam.gamma.data.copy_(torch.tensor([2.0, 0.5]))
        assert norm(layer.fc1.weight) == pytest.approx(2.0, abs=1e-5)
        assert norm(layer.fc2.weight) == pytest.approx(0.5, abs=1e-5)


def test_the_backward_pass_of_a_gpu_and_that_of_a_cpu_are_one():
    torch.manual_seed(0)
    shapes = [(3, 5), (4, 4), (6, 2)]
    grads, weights = ([torch.randn(n, m, dtype=torch.float64).t() for m, n in shapes] for _ in range(2))
    vs, us = ([torch.randn(shape[side], dtype=torch.float64) for shape in shapes] for side in (0, 1))
    gamma, norms = torch.rand(2, 3, dtype=torch.float64) + 0.5
    in_calls = sigma._rescale_in_few_calls(gamma, norms, grads, weights, us, vs)
    in_passes = sigma._rescale_in_few_passes(gamma, norms, grads, weights, us, vs)
    torch.testing.assert_close(in_calls, in_passes, rtol=1e-12, atol=1e-12)


def test_power_iteration_converges_to_the_svd_from_its_fixed_start():
    exact, iterated = model(svd=True), model()
    for (_, a), (_, b) in zip(states(exact), states(iterated), strict=True):
        torch.testing.assert_close(b.sigma, a.sigma, rtol=2e-4, atol=0)


@pytest.mark.parametrize("converged", [True, False])
def test_gradient_is_the_formula(converged):
    """dW = gamma/sigma (G - <G,W>/sigma v u^T), dgamma = <G,W>/sigma, also with a u that has not converged."""
    torch.manual_seed(1)
    linear = nn.Linear(5, 4, bias=False).double()
    sigma_reparam(linear, svd=converged)
    state = linear.sigma_reparam
    if not converged:
        state.u.copy_(nn.functional.normalize(torch.randn(5).double(), dim=0))
        state.power_step()
    state.gamma.data.fill_(1.7)
    w, u, v = linear.parametrizations.weight.original, state.u, state.v
    g = torch.randn(4, 5).double()
    (linear.weight * g).sum().backward()
    sigma, c = v @ w @ u, (g * w).sum()
    assert state.sigma.item() == pytest.approx(sigma.item(), rel=1e-12)
    torch.testing.assert_close(w.grad, 1.7 / sigma * (g - c / sigma * torch.outer(v, u)), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(state.gamma.grad, (c / sigma)[None], rtol=1e-12, atol=1e-14)
    assert (w.grad * w).sum().abs() < 1e-13


def test_gradient_of_many_weights_against_autograd_and_its_own_derivative():
    net = model(torch.float64, svd=True)
    loss = net(TOKENS).square().sum()
    parameters = [p for p in net.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, parameters, retain_graph=True)
    twice = torch.autograd.grad(loss, parameters, create_graph=True)
    for once, again in zip(grads, twice, strict=True):
        torch.testing.assert_close(once, again)
    # a Hessian-vector product against a finite difference of gradients along the same direction
    torch.manual_seed(2)
    direction = [torch.randn_like(p) for p in parameters]
    product = torch.autograd.grad(twice, parameters, direction)

    def gradient_at(step):
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.add_(d, alpha=step)
        for _, state in states(net):  # sigma = v^T W u of the moved weights, u and v held
            pairs = zip(state.matrices, *state._split(), strict=True)
            state.sigma.copy_(torch.stack([v @ matrix.raw().detach() @ u for matrix, u, v in pairs]))
        result = torch.autograd.grad(net(TOKENS).square().sum(), parameters)
        with torch.no_grad():
            for p, d in zip(parameters, direction, strict=True):
                p.sub_(d, alpha=step)
        return result

    for p, plus, minus in zip(product, gradient_at(1e-5), gradient_at(-1e-5), strict=True):
        torch.testing.assert_close(p, (plus - minus) / 2e-5, rtol=1e-4, atol=1e-4)


def test_scale_of_w_is_free():
    net = model()
    before = net.layers[0].fc1.weight.detach().clone()
    net.layers[0].fc1.parametrizations.weight.original.data.mul_(3)
    power_step(net)
    torch.testing.assert_close(net.layers[0].fc1.weight, before, rtol=1e-4, atol=1e-6)


def test_norm_follows_the_weights_while_training():
    net = model()
    train(net, 30)
    for layer in net.layers:
        power_step(net)
        assert norm(layer.fc1.weight) == pytest.approx(layer.sigma_reparam.gamma[0].abs().item(), rel=2e-2)


def test_spectral_gamma_changes_nothing_at_first():
    torch.manual_seed(0)
    plain = Model()
    torch.testing.assert_close(model(gamma_init="spectral")(TOKENS), plain(TOKENS))


def test_positive_gamma_stays_positive():
    net = model(positive_gamma=True)
    state = net.layers[0].sigma_reparam
    torch.testing.assert_close(state.effective_gamma(), torch.ones(2))
    state.gamma.data.fill_(-20.0)
    assert (state.effective_gamma() > 0).all()


def test_fixed_gamma_is_not_trained():
    net = model(learn_gamma=False)
    train(net, 3)
    assert all(torch.equal(state.gamma, torch.ones(2)) for _, state in states(net))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-6, 4e3])
def test_state_stays_float32_in_low_precision(dtype, scale):
    net = model()
    for layer in net.layers:
        layer.fc1.parametrizations.weight.original.data.mul_(scale)
    net = net.to(dtype)
    for _, state in states(net):
        assert {state.u.dtype, state.v.dtype, state.sigma.dtype, state.gamma.dtype} == {torch.float32}
        state.reestimate()
        assert state.matrices[0].raw().dtype == dtype
    # what the scaled fp16 matrix has become is what is normalised
    assert norm(net.layers[0].fc1.weight) == pytest.approx(1.0, abs=2e-3)
    assert net.layers[0].fc1.weight.dtype == dtype


def test_zero_weight_gives_zero_and_finite_gradients_and_recovers():
    net = model()
    weight = net.layers[0].fc1.parametrizations.weight.original
    saved = weight.detach().clone()
    weight.data.zero_()
    power_step(net)
    power_step(net)
    net(TOKENS).sum().backward()
    assert torch.equal(net.layers[0].fc1.weight, torch.zeros_like(weight))
    assert all(p.grad.isfinite().all() for p in net.parameters() if p.grad is not None)
    assert all(buffer.isfinite().all() for buffer in net.buffers())
    weight.data.copy_(saved)
    for _ in range(60):
        power_step(net)
    assert norm(net.layers[0].fc1.weight) == pytest.approx(1.0, abs=1e-2)


def test_two_forwards_before_one_backward_see_one_weight():
    net = model()
    power_step(net)
    first, second = net(TOKENS), net(TOKENS)
    assert torch.equal(first, second)
    (first.sum() + second.sum()).backward()


def test_evaluation_changes_no_buffer_and_repeats_exactly():
    net = model()
    train(net, 5)
    net.eval()
    before = {name: buffer.clone() for name, buffer in net.named_buffers()}
    with torch.no_grad():
        assert torch.equal(net(TOKENS), net(TOKENS))
    assert all(torch.equal(before[name], buffer) for name, buffer in net.named_buffers())


def test_evaluation_does_not_trust_the_length_of_u():
    """An exponential moving average of checkpoints also averages u and v, which are then no unit vectors."""
    net = model(svd=True).eval()
    before = net(TOKENS)
    for _, state in states(net):
        state.u.mul_(0.3)
        state.v.zero_()
    torch.testing.assert_close(net(TOKENS), before)


def test_evaluation_sees_weights_that_change_in_place():
    net = model().eval()
    with torch.no_grad():
        before = net(TOKENS)
        net.layers[0].sigma_reparam.gamma.mul_(2)
        assert not torch.equal(before, net(TOKENS))


def test_tied_weight_is_left_alone():
    net = model()
    assert net.output.weight is net.embedding.weight
    assert "output.weight" not in sigma_reparam(Model())


def test_state_dict_holds_each_weight_once_and_round_trips():
    net = model()
    train(net, 3)
    state = net.state_dict()
    assert sum(key.startswith("layers.0.fc1.") and "weight" in key for key in state) == 1
    other = model()
    other.load_state_dict(state)
    assert torch.equal(net.eval()(TOKENS), other.eval()(TOKENS))


def test_copy_is_independent():
    net = model()
    other = copy.deepcopy(net)
    train(other, 3)
    assert not torch.equal(other.layers[0].sigma_reparam.u, net.layers[0].sigma_reparam.u)
    assert torch.equal(model()(TOKENS), net(TOKENS))


def test_update_number_advances_u_once():
    net = model()
    net.layers[0].fc1.parametrizations.weight.original.data.normal_()
    state = net.layers[0].sigma_reparam
    state.set_num_updates(1)
    once = state.u.clone()
    state.set_num_updates(1)
    assert torch.equal(state.u, once)
    state.set_num_updates(2)
    assert not torch.equal(state.u, once)


def test_fused_matrix_gets_a_norm_per_chunk():
    torch.manual_seed(0)
    linear = nn.Linear(8, 24)
    linear.weight.data[:8] *= 10
    sigma_reparam(linear, chunks={"": 3}, svd=True)
    assert linear.sigma_reparam.gamma.shape == (3,)
    for block in linear.weight.chunk(3):
        assert norm(block) == pytest.approx(1.0, abs=1e-5)


def test_convolution_and_embedding():
    net = nn.Sequential(nn.Conv1d(3, 5, 7), nn.Conv2d(5, 4, 3), nn.Embedding(6, 4))
    names = sigma_reparam(net, embeddings=True, svd=True)
    assert names == ["0.weight", "1.weight", "2.weight"]
    assert all(norm(layer.weight.flatten(1)) == pytest.approx(1.0, abs=1e-5) for layer in net[:3])


def test_unused_weight_gets_no_gradient():
    net = model()
    net.layers[0].forward = lambda x: x + net.layers[0].fc1(x)[..., : x.shape[-1]]
    net(TOKENS).sum().backward()
    layer = net.layers[0]
    assert layer.fc2.parametrizations.weight.original.grad is None
    assert layer.sigma_reparam.gamma.grad[1] == 0
    assert layer.sigma_reparam.gamma.grad[0] != 0


def test_fold_keeps_the_function_and_the_tie():
    net = model()
    train(net, 5)
    net.eval()
    before = net(TOKENS)
    names = fold(net)
    assert len(names) == 6
    assert torch.equal(net(TOKENS), before)
    assert set(net.state_dict()) == set(Model().state_dict())
    assert net.output.weight is net.embedding.weight
    train(net, 1)  # plain parameters again


def test_nothing_to_do_or_twice_is_refused():
    with pytest.raises(ValueError, match="no weight of Linear matches"):
        sigma_reparam(nn.Linear(2, 2), include="nowhere")
    with pytest.raises(ValueError, match="already parametrised"):
        sigma_reparam(model())


def test_containers_still_run(recwarn):
    """A state among the children of a Sequential would be called as a layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ModuleList([nn.Sequential(nn.Linear(4, 2), nn.Tanh())])[0])
    assert sigma_reparam(net) == ["0.weight", "2.0.weight"]
    before = net.eval()(torch.ones(1, 4))
    fold(net)
    torch.testing.assert_close(net(torch.ones(1, 4)), before)
    assert not recwarn.list


def test_a_bare_linear():
    assert sigma_reparam(nn.Linear(3, 3)) == ["weight"]


def test_packed_attention_has_a_norm_for_each_of_its_three_matrices():
    """nn.MultiheadAttention keeps W_q, W_k and W_v above each other in one bare parameter."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, dropout=0.0, batch_first=True)
    with torch.no_grad():
        layer.self_attn.in_proj_weight[8:16] *= 5
    names = sigma_reparam(layer)
    assert names == ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight", "linear2.weight"]
    packed = layer.self_attn.in_proj_weight
    for chunk in packed.chunk(3):
        torch.testing.assert_close(torch.linalg.matrix_norm(chunk, 2), torch.tensor(1.0), rtol=1e-4, atol=0)

    x = torch.randn(2, 5, 8)
    layer(x).square().sum().backward()
    (state,) = [state for _, state in states(layer)]
    assert state.gamma.grad[:3].abs().min() > 0
    trained = layer(x)
    layer.eval()
    with torch.no_grad():
        torch.testing.assert_close(layer(x), trained, rtol=1e-4, atol=1e-5)  # torch's fused path
    fold(layer)
    assert layer.self_attn.in_proj_weight.is_leaf
    torch.testing.assert_close(layer(x), trained, rtol=1e-4, atol=1e-5)


def test_attention_over_keys_of_another_width():
    attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=4)
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"]
    assert sigma_reparam(attention) == names
    attention(torch.randn(5, 2, 8), torch.randn(3, 2, 6), torch.randn(3, 2, 4))[0].sum().backward()
    assert fold(attention) == names
