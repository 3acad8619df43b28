"""Token measures equal brute force over valid tokens; the dominating eigenvalue foretells the iteration."""

from __future__ import annotations

import math

import pytest
import torch

from speech_mt.diagnostics.oversmoothing import (
    asymmetry,
    attention_map_similarity,
    condition_number,
    dominating_share,
    high_to_low_frequency,
    rank_collapse_residual,
    token_cosine,
    value_output_eigenvalues,
    value_output_matrix,
)

MEASURES = [token_cosine, high_to_low_frequency, rank_collapse_residual]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padded(lengths, size, side):
    position = torch.arange(size)
    if side == "left":
        position = position.flip(0)
    return position >= torch.tensor(lengths).unsqueeze(1)


def brute_cosine(x):
    pairs = [
        torch.cosine_similarity(x[i], x[j], dim=0) for i in range(len(x)) for j in range(len(x)) if i != j
    ]
    return torch.stack(pairs).mean()


def brute_frequency(x):
    """By the Fourier transform over tokens: component 0 against the others."""
    spectrum = torch.fft.fft(x, dim=0, norm="ortho")
    return spectrum[1:].abs().norm() / spectrum[0].abs().norm()


def brute_residual(x):
    def norm(m):
        return (torch.linalg.matrix_norm(m, 1) * torch.linalg.matrix_norm(m, torch.inf)).sqrt()

    return norm(x - x.mean(0)) / norm(x)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("measure", "brute"), list(zip(MEASURES, [brute_cosine, brute_frequency, brute_residual], strict=True))
)
def test_equals_brute_force_on_valid_tokens(measure, brute, side):
    x, mask = draw(4, 9, 6) + 0.5, padded([9, 5, 2, 1], 9, side)
    x[mask] = 1e3  # what stands at padding must not matter
    found = measure(x, mask)
    for sentence in range(3):
        want = brute(x[sentence][~mask[sentence]].double())
        assert found[sentence].item() == pytest.approx(want.item(), rel=1e-5, abs=1e-6)
    assert found[3].isnan()  # a single token says nothing
    torch.testing.assert_close(measure(x[:1]), found[:1])


@pytest.mark.parametrize("measure", MEASURES)
def test_of_nothing_is_nan(measure):
    assert measure(draw(1, 3, 4), torch.ones(1, 3, dtype=torch.bool)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("measure", MEASURES)
def test_half_precision_is_widened_and_autocast_ignored(measure, dtype):
    x = (draw(2, 50, 8) + 2).to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = measure(x)
    torch.testing.assert_close(found, measure(x.float()), rtol=1e-6, atol=0)


def test_hand_checked():
    """Tokens (1, 0), (0, 1): cosine 0, mean (1/2, 1/2), both parts of norm 1. Opposite tokens: cosine -1."""
    x = torch.eye(2).unsqueeze(0)
    assert token_cosine(x).item() == pytest.approx(0, abs=1e-7)
    assert high_to_low_frequency(x).item() == pytest.approx(1)
    assert rank_collapse_residual(x).item() == pytest.approx(1)
    opposite = torch.tensor([[[2.0, 0.0], [-3.0, 0.0]]])
    assert token_cosine(opposite).item() == pytest.approx(-1)


def test_collapsed_tokens():
    x = draw(2, 1, 6).expand(-1, 7, -1)
    assert token_cosine(x).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert high_to_low_frequency(x).max() < 1e-6
    assert rank_collapse_residual(x).max() < 1e-6


@pytest.mark.parametrize("tokens", [10, 200])
def test_length_normalised_ratio_of_unrelated_tokens_is_one(tokens):
    found = high_to_low_frequency(draw(64, tokens, 64), length_normalised=True)
    assert found.mean().item() == pytest.approx(1, abs=0.05)
    torch.testing.assert_close(found * math.sqrt(tokens - 1), high_to_low_frequency(draw(64, tokens, 64)))


def test_map_similarity_equals_the_cosine_of_flattened_maps():
    first, second = draw(3, 2, 5, 4).softmax(-1), draw(3, 2, 5, 4, seed=1).softmax(-1)
    queries, keys = padded([5, 3, 0], 5, "right"), padded([4, 2, 4], 4, "left")
    found = attention_map_similarity(first, second, query_padding_mask=queries, key_padding_mask=keys)
    cosines = []
    for sentence in range(2):  # the third has no valid row
        for head in range(2):
            a, b = (
                x[sentence, head][~queries[sentence]][:, ~keys[sentence]].flatten() for x in (first, second)
            )
            cosines.append(torch.cosine_similarity(a, b, dim=0))
    want = torch.stack(cosines).mean().item()
    assert found.flatten().tolist() == pytest.approx([1, want, want, 1], abs=1e-6)


def test_value_output_matrix_is_what_a_head_does_to_a_token():
    value, output, x = draw(8, 8), draw(8, 8, seed=1), draw(3, 8, seed=2)
    torch.testing.assert_close(x @ value_output_matrix(value, output), (x @ value.T) @ output.T)
    g = draw(8, seed=3)
    torch.testing.assert_close(x @ value_output_matrix(value, output, g), ((x * g) @ value.T) @ output.T)


@pytest.mark.parametrize("scaled", [False, True])
def test_eigenvalues_of_a_head_are_those_of_its_large_matrix(scaled):
    heads, size = 2, 3
    value, output, g = draw(6, 6), draw(6, 6, seed=1), draw(6, seed=2) if scaled else None
    found = value_output_eigenvalues(value, output, heads, g)
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        large = torch.linalg.eigvals(value_output_matrix(value[rows], output[:, rows], g).double())
        largest = large[large.abs().argsort(descending=True)][:size]
        for eigenvalue in found[head]:
            assert (largest - eigenvalue).abs().min() < 1e-6
        assert found[head].sum().real.item() == pytest.approx(largest.sum().real.item(), abs=1e-6)


def test_orthogonal_construction_has_the_eigenvalues_it_was_given():
    """W_V = V, W_O = diag(l) V^T: symmetric, eigenvalues l, per head those of its channels."""
    v = torch.linalg.qr(draw(8, 8)).Q
    eigenvalues = torch.linspace(-1, -0.1, 8)
    value, output = v.T, v * eigenvalues
    matrix = value_output_matrix(value, output)
    assert asymmetry(matrix).item() < 1e-6
    assert condition_number(matrix).item() == pytest.approx(10, rel=1e-5)
    found = value_output_eigenvalues(value, output, 2)
    assert found.imag.abs().max() < 1e-6
    torch.testing.assert_close(found.real.sort().values.flatten().float(), eigenvalues)


def test_asymmetry_at_its_ends_and_for_random_matrices():
    matrix = draw(60, 60)
    assert asymmetry(matrix + matrix.T).item() == 0
    assert asymmetry(matrix - matrix.T).item() == pytest.approx(1)
    assert asymmetry(draw(5, 200, 200)).mean().item() == pytest.approx(math.sqrt(0.5), abs=0.01)


def test_condition_number():
    assert condition_number(torch.diag(torch.tensor([4.0, 2.0, 0.5]))).item() == 8
    assert condition_number(torch.diag(torch.tensor([4.0, 0.0]))).item() == math.inf


def attention(heads, length, causal):
    logits = draw(1, heads, length, length, seed=5)
    if causal:
        logits = logits.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -math.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize(
    ("eigenvalue", "causal", "smoothing"),
    [
        (0.3, False, 1.0),
        (0.3, True, 1.0),
        (0.3j, True, 1.0),  # any phase up to 90 degrees where the spectrum of A is real
        (-0.3, False, 0.0),
        (-0.3, True, 0.0),
        (-1.0, False, 0.0),
        (-1.0, True, 0.0),
    ],
)
def test_sign_of_h_decides(eigenvalue, causal, smoothing):
    """l > 0 smooths for every attention map, l in [-1, 0) for none."""
    values = torch.full((2, 4), eigenvalue, dtype=torch.complex128)
    found = dominating_share(values, attention(2, 6, causal), causal=causal)
    assert found.smoothing.tolist() == [smoothing, smoothing]
    assert (found.smoothing + found.sharpening + found.neither).tolist() == pytest.approx([1, 1])


def test_below_the_threshold_a_negative_eigenvalue_smooths_again():
    """lA_1 = 0.108 puts the threshold at -2 / 1.108 = -1.805."""
    weights = torch.tensor([[[[1.0, 0.0], [0.892, 0.108]]]])
    values = torch.tensor([[-1.769, -1.841]], dtype=torch.complex128)
    found = dominating_share(values, weights, causal=True)
    assert (found.smoothing.item(), found.sharpening.item()) == (0.5, 0.5)


def test_ties_dominate_nowhere():
    """A zero eigenvalue of H leaves its channel alone; identity attention has only the eigenvalue 1."""
    values = torch.tensor([[0.0, 0.5]], dtype=torch.complex128)
    assert dominating_share(values, attention(1, 5, False)).neither.item() == 0.5
    assert dominating_share(values, torch.eye(5)[None, None]).neither.item() == 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_cut_out(side):
    values = torch.complex(draw(2, 3), draw(2, 3, seed=1)).to(torch.complex128)
    small = attention(2, 5, False)
    mask = padded([5, 0], 7, side)
    weights = torch.full((2, 2, 7, 7), 9.0)
    at = slice(0, 5) if side == "right" else slice(2, 7)
    weights[:1, :, at, at] = small
    for found, want in zip(
        dominating_share(values, weights, mask), dominating_share(values, small), strict=True
    ):
        torch.testing.assert_close(found, want)
    nothing = dominating_share(values, weights[1:], mask[1:])
    assert all(share.isnan().all() for share in nothing)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("sign", "collapses"), [(1, True), (-1, False)])
def test_the_prediction_comes_true(causal, sign, collapses):
    """Iterate X <- X + A X H, normalised: HFC/LFC goes to 0 exactly where the eigenvalue 1 of A dominates."""
    v = torch.linalg.qr(draw(6, 6).double()).Q
    value, output = v.T, v * (sign * torch.linspace(0.2, 0.8, 6))
    weights = attention(1, 8, causal).double()
    share = dominating_share(value_output_eigenvalues(value, output, 1), weights, causal=causal)
    x = draw(1, 8, 6, seed=9).double()
    for _ in range(400):
        x = x + weights[0] @ x @ value_output_matrix(value, output)
        x = x / x.norm()
    assert share.smoothing.item() == float(collapses)
    ratio = high_to_low_frequency(x).item()
    assert ratio < 1e-6 if collapses else ratio > 0.1
