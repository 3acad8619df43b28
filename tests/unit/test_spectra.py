"""Spectra equal a full SVD of the formed matrices; the entropy bound of Theorem 3.1 holds and is attained."""

from __future__ import annotations

import math

import pytest
import torch

from speech_mt.diagnostics.attention_entropy import entropy_from_weights
from speech_mt.diagnostics.spectra import (
    attention_sigma,
    effective_rank,
    entropy_lower_bound,
    query_key_singular_values,
    spectral_energy_concentration,
    spectral_norm,
)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(40, 40), (30, 70), (3, 20, 50), (1, 9), (9, 1)])
def test_power_iteration_finds_the_largest_singular_value(shape):
    matrix = draw(*shape)
    want = torch.linalg.svdvals(matrix.double())[..., 0].float()
    torch.testing.assert_close(spectral_norm(matrix, exact=True), want)
    found = spectral_norm(matrix, tolerance=1e-6)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=0)
    assert (found <= want * (1 + 1e-6)).all()


def test_power_iteration_reaches_every_block():
    """diag(20, ones of 30 x 30): the row of largest norm is 20, the largest singular value is 30."""
    matrix = torch.block_diag(20 * torch.eye(1), torch.ones(30, 30))
    assert spectral_norm(matrix).item() == pytest.approx(30, rel=1e-4)


@pytest.mark.parametrize("scale", [1e-30, 1e-10, 1e15])
def test_spectral_norm_at_any_scale(scale):
    matrix = draw(20, 30)
    want = scale * torch.linalg.svdvals(matrix)[0].item()
    assert spectral_norm(scale * matrix).item() == pytest.approx(want, rel=1e-3)


def test_spectral_norm_of_zero_nan_and_half():
    assert spectral_norm(torch.zeros(4, 5)).item() == 0
    assert spectral_norm(torch.full((4, 5), float("nan"))).isnan()
    found = spectral_norm(draw(20, 30).bfloat16())
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(spectral_norm(draw(20, 30), exact=True).item(), rel=1e-2)


def test_spectral_norm_draws_nothing_from_the_global_generator():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = spectral_norm(draw(20, 30))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(spectral_norm(draw(20, 30)), first)


@pytest.mark.parametrize(("heads", "size", "width", "keys"), [(4, 8, 32, 32), (2, 8, 16, 24), (2, 8, 4, 4)])
def test_query_key_core_equals_the_full_product(heads, size, width, keys):
    query, key = draw(heads * size, width), draw(heads * size, keys, seed=1)
    found = query_key_singular_values(query, key, heads)
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        want = torch.linalg.svdvals(query[rows].double().T @ key[rows].double())[: found.size(1)]
        torch.testing.assert_close(found[head].double(), want, rtol=1e-5, atol=1e-5)


def test_autocast_changes_nothing():
    query, key, x = draw(16, 16), draw(16, 16, seed=1), draw(2, 5, 16, seed=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = (
            spectral_norm(query),
            query_key_singular_values(query, key, 2),
            attention_sigma(query, key, x, 2),
        )
    assert torch.equal(found[0], spectral_norm(query))
    assert torch.equal(found[1], query_key_singular_values(query, key, 2))
    assert torch.equal(found[2], attention_sigma(query, key, x, 2))


def test_orthogonal_and_scaled_heads_are_known():
    """W_Q = 3 I, W_K = diag(1, 2, 3, 4) in one head: singular values 12, 9, 6, 3."""
    found = query_key_singular_values(3 * torch.eye(4), torch.diag(torch.arange(1.0, 5)), 1)
    assert found.tolist()[0] == pytest.approx([12, 9, 6, 3], rel=1e-6)


def test_effective_rank_and_energy_concentration():
    """Singular values 3, 1: p = 3/4, 1/4; energy 9 of 10. Equal values: the rank itself."""
    values = torch.tensor([[3.0, 1.0, 0.0], [2.0, 2.0, 2.0], [5.0, 0.0, 0.0]])
    first = math.exp(math.log(4) - 0.75 * math.log(3))
    assert effective_rank(values).tolist() == pytest.approx([first, 3, 1])
    assert spectral_energy_concentration(values, 1).tolist() == pytest.approx([0.9, 1 / 3, 1])
    assert spectral_energy_concentration(values, 2).tolist() == pytest.approx([1, 2 / 3, 1])
    assert effective_rank(torch.zeros(3)).isnan()
    assert spectral_energy_concentration(torch.zeros(3), 1).isnan()


@pytest.mark.parametrize(
    ("keys", "sigma", "bound"),
    [(2, 1, 0.494200), (4, 5, 0.062633), (16, 5, 0.490288), (256, 5, 4.149079), (256, 10, 0.123758)],
)
def test_entropy_bound_values(keys, sigma, bound):
    assert entropy_lower_bound(torch.tensor(float(sigma)).double(), keys).item() == pytest.approx(
        bound, abs=1e-6
    )
    assert entropy_lower_bound(sigma, keys).item() == pytest.approx(bound, abs=1e-5)


@pytest.mark.parametrize("keys", [2, 5, 256])
@pytest.mark.parametrize("sigma", [0.1, 1.0, 10.0])
def test_entropy_bound_is_attained(keys, sigma):
    """By a zero-mean row of norm sigma with one large entry and the others equal."""
    row = torch.full((keys,), -1.0, dtype=torch.float64)
    row[0] = keys - 1
    row *= sigma / row.norm()
    want = entropy_from_weights(row.softmax(-1))
    found = entropy_lower_bound(torch.tensor(sigma, dtype=torch.float64), keys)
    torch.testing.assert_close(found, want, atol=1e-12, rtol=1e-9)


def test_entropy_bound_at_the_ends():
    """No logits: log(keys). Huge or infinite sigma: 0, not NaN. One key: 0. Unknown sigma: NaN."""
    assert entropy_lower_bound(0.0, 7).item() == pytest.approx(math.log(7))
    assert entropy_lower_bound(torch.tensor([1e3, 1e30, math.inf]), 7).tolist() == [0, 0, 0]
    assert entropy_lower_bound(torch.tensor([0.0, 3.0]), 1).tolist() == [0, 0]
    assert entropy_lower_bound(torch.tensor(math.nan), 7).isnan()


def test_entropy_bound_broadcasts_over_heads_and_keys():
    found = entropy_lower_bound(torch.tensor([[1.0], [2.0]]), torch.tensor([2, 4, 8]))
    assert found.shape == (2, 3)
    assert found[1, 2].item() == pytest.approx(entropy_lower_bound(2.0, 8).item())


@pytest.mark.parametrize(("causal", "cross"), [(False, False), (True, False), (False, True)])
def test_no_row_of_a_real_head_falls_below_the_bound(causal, cross):
    """With biases, padding and 1/sqrt(d_head), in self-attention (causal or not) and cross-attention."""
    heads, size, width, length = 2, 4, 8, 6
    keys = 5 if cross else length
    query, key = 0.2 * draw(heads * size, width), 0.2 * draw(heads * size, width, seed=1)
    query_bias, key_bias = 0.2 * draw(heads * size, seed=2), draw(heads * size, seed=3)
    x = 0.2 * draw(200, length, width, seed=4)
    memory = 0.2 * draw(200, keys, width, seed=5) if cross else x
    mask = torch.zeros(200, keys, dtype=torch.bool)
    mask[100:, -2:] = True
    sigma = attention_sigma(
        query,
        key,
        x,
        heads,
        None if cross else mask,
        query_bias=query_bias,
        memory=memory if cross else None,
        memory_padding_mask=mask if cross else None,
    )
    q = (x @ query.T + query_bias).unflatten(-1, (heads, size)).transpose(1, 2)
    k = (memory @ key.T + key_bias).unflatten(-1, (heads, size)).transpose(1, 2)
    hidden = mask[:, None, None, :].expand(-1, heads, length, -1)
    if causal:
        hidden = hidden | torch.ones(length, length, dtype=torch.bool).triu(1)
    logits = (q @ k.mT / math.sqrt(size)).masked_fill(hidden, -math.inf)
    bound = entropy_lower_bound(sigma.unsqueeze(-1), (~hidden).sum(-1))
    real = slice(None) if cross else slice(None, -2)  # padded queries are not rows of X
    slack = (entropy_from_weights(logits.softmax(-1)) - bound)[:, :, real]
    assert slack.min() > -1e-6
    assert bound.max() > 0.1  # the bound says something here


def test_sigma_counts_a_query_bias_and_no_padding():
    """W_Q = 0 and bias (2, 0): logits are <(2, 0), W_K x>. ||[X, 1]||_2 = sqrt(2 + 2) for two unit tokens (1, 0)."""
    x = torch.tensor([[[1.0, 0.0], [1.0, 0.0], [9.0, 9.0]]])
    mask = torch.tensor([[False, False, True]])
    bias = torch.tensor([2.0, 0.0])
    found = attention_sigma(torch.zeros(2, 2), torch.eye(2), x, 1, mask, query_bias=bias, scale=1.0)
    assert found.item() == pytest.approx(2 * 2 * math.sqrt(2), rel=1e-5)
    found = attention_sigma(torch.eye(2), torch.eye(2), x, 1, memory=x, memory_padding_mask=mask, scale=1.0)
    whole = torch.linalg.matrix_norm(x[0], 2).item()
    assert found.item() == pytest.approx(whole * math.sqrt(2), rel=1e-5)


def test_sigma_of_a_known_head():
    """W_Q = 2 I, W_K = 3 I, d_head = 4, orthogonal tokens of length 5: 2 * 3 * 25 / sqrt(4) = 75."""
    sigma = attention_sigma(2 * torch.eye(4), 3 * torch.eye(4), 5 * torch.eye(4).unsqueeze(0), 1)
    assert sigma.tolist() == [[pytest.approx(75, rel=1e-5)]]
