"""Entropy from the fused call and from blocks equals brute force in float64; nothing is hidden as 0."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from speech_mt.diagnostics import attention_entropy as module
from speech_mt.diagnostics.attention_entropy import (
    attention_entropy,
    attention_rows,
    entropy_from_weights,
    entropy_statistics,
    largest_per_head,
    max_logit,
    visible_keys,
)

INF = float("inf")


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def padding(lengths, size, side):
    """(B, S) mask, True at padding, with the real tokens at the left or at the right."""
    position = torch.arange(size)
    if side == "left":
        position = position.flip(0)
    return position >= torch.tensor(lengths).unsqueeze(1)


def brute_logits(q, k, mask, causal, scale):
    logits = scale * (q.double() @ k.double().transpose(-1, -2))
    if mask is not None:
        logits = logits.masked_fill(mask[:, None, None, :], -INF)
    if causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -INF)
    return logits


def brute_entropy(q, k, mask=None, causal=False, scale=None):
    p = brute_logits(q, k, mask, causal, q.size(-1) ** -0.5 if scale is None else scale).softmax(-1)
    return torch.special.entr(p).sum(-1)


ROADS = [attention_entropy, lambda *args, **kwargs: attention_rows(*args, **kwargs).entropy]


@pytest.fixture(params=ROADS, ids=["fused", "blocks"])
def entropy_of(request):
    return request.param


@pytest.fixture
def small_blocks(monkeypatch):
    """Make the blocks so small that every loop runs more than once."""
    monkeypatch.setattr(module, "CPU_BLOCK", 500 // torch.get_num_threads())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", [None, "right", "left"])
def test_equals_brute_force(entropy_of, side, causal):
    q, k = draw(3, 2, 45, 16), draw(3, 2, 45, 16, seed=1)
    mask = None if side is None else padding([45, 30, 1], 45, side)
    found, want = entropy_of(q, k, mask, causal), brute_entropy(q, k, mask, causal)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, atol=2e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize("causal", [False, True])
def test_small_blocks_equal_brute_force(small_blocks, causal):
    q, k = draw(2, 3, 45, 16), draw(2, 3, 45, 16, seed=1)
    mask = padding([45, 30], 45, "left")
    assert len(list(module._logit_blocks(q, k, mask, causal, 1.0))) > 12
    rows = attention_rows(q, k, mask, causal)
    logits = brute_logits(q, k, mask, causal, 0.25)
    torch.testing.assert_close(rows.logsumexp.double(), logits.logsumexp(-1), atol=2e-6, rtol=0)
    torch.testing.assert_close(rows.max_logit.double(), logits.amax(-1), atol=2e-6, rtol=0)
    want = brute_entropy(q, k, mask, causal)
    torch.testing.assert_close(rows.entropy.double(), want, atol=2e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("queries", "keys"), [(7, 40), (40, 7), (1, 9), (9, 1), (1, 1)])
def test_cross_attention_and_single_rows(entropy_of, queries, keys):
    q, k = draw(2, 2, queries, 8), draw(2, 2, keys, 8, seed=1)
    mask = padding([keys, (keys + 1) // 2], keys, "right")
    torch.testing.assert_close(entropy_of(q, k, mask).double(), brute_entropy(q, k, mask), atol=2e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_input_is_exact_for_the_rounded_queries_and_keys(entropy_of, dtype):
    q, k = (4 * draw(2, 2, 33, 16)).to(dtype), draw(2, 2, 33, 16, seed=1).to(dtype)
    found = entropy_of(q, k, causal=True)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), brute_entropy(q, k, causal=True), atol=5e-6, rtol=0)


def test_float64_stays_float64(entropy_of):
    q, k = draw(1, 2, 20, 8).double(), draw(1, 2, 20, 8, seed=1).double()
    torch.testing.assert_close(entropy_of(q, k), brute_entropy(q, k), atol=1e-13, rtol=0)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),  # time first, as fairseq stores it
        lambda x: (
            x.transpose(2, 3).contiguous().transpose(2, 3)
        ),  # neighbours within a head are not in memory
        lambda x: torch.cat([x, x], -1)[..., : x.size(-1)],  # a slice of a fused projection
    ],
    ids=["time-first", "transposed", "slice"],
)
def test_strided_views(entropy_of, view):
    q, k = draw(2, 3, 20, 8), draw(2, 3, 20, 8, seed=1)
    mask = padding([20, 11], 20, "right")
    found = entropy_of(view(q), view(k), mask, causal=True)
    torch.testing.assert_close(found.double(), brute_entropy(q, k, mask, True), atol=2e-6, rtol=0)


def test_autocast_and_gradient_change_nothing(entropy_of):
    q, k = draw(1, 2, 20, 8).requires_grad_(), draw(1, 2, 20, 8, seed=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, largest = entropy_of(q, k), max_logit(q, k)
    assert torch.equal(found, entropy_of(q, k))
    assert torch.equal(largest, max_logit(q, k))
    assert not found.requires_grad


def test_hand_checked(entropy_of):
    """Logits (log 3, 0): p = (3/4, 1/4), entropy = log 4 - 3/4 log 3; equal logits give log(keys)."""
    q = torch.tensor([[[[1.0], [0.0]]]])
    k = torch.tensor([[[[math.log(3)], [0.0]]]])
    want = [math.log(4) - 0.75 * math.log(3), math.log(2)]
    assert entropy_of(q, k, scale=1.0).flatten().tolist() == pytest.approx(want, abs=1e-6)


def test_large_logits_stay_exact_and_never_below_zero(entropy_of):
    """Logits of several hundred: rounding is about 1e-7 of them, and a fully peaked row is 0.0, not -0.0."""
    q, k = 60 * draw(2, 2, 50, 16), draw(2, 2, 50, 16, seed=1)
    found = entropy_of(q, k)
    assert max_logit(q, k).min() > 200
    torch.testing.assert_close(found.double(), brute_entropy(q, k), atol=2e-4, rtol=0)
    assert (found >= 0).all()
    assert not torch.signbit(found).any()


def test_rounding_below_zero_becomes_zero_and_nan_stays(monkeypatch):
    rounded = torch.tensor([-1e-7, -0.0, float("nan"), 0.5])
    monkeypatch.setattr(module, "_fused_entropy", lambda *args: lambda *args: rounded.expand(1, 1, 4))
    found = attention_entropy(draw(1, 1, 4, 8), draw(1, 1, 4, 8))[0, 0]
    assert found[[0, 1, 3]].tolist() == [0, 0, 0.5]
    assert not torch.signbit(found[:2]).any()
    assert found[2].isnan()


def test_in_blocks_peaked_rows_do_not_cancel():
    """Logits 1e6 and 1e6 - 4: subtracting numbers of that size in float32 would be off by 0.06."""
    q, k = torch.tensor([[[[1.0]]]]), torch.tensor([[[[1e6], [1e6 - 4]]]])
    found = attention_rows(q, k, scale=1.0).entropy
    torch.testing.assert_close(found.double(), brute_entropy(q, k, scale=1.0), atol=1e-7, rtol=0)


@pytest.mark.parametrize("bad", [float("nan"), INF])
def test_a_bad_query_is_nan_in_its_row_only(entropy_of, bad):
    q, k = draw(1, 2, 20, 8), draw(1, 2, 20, 8, seed=1)
    q[0, 1, 3, 2] = bad
    found = entropy_of(q, k, padding([15], 20, "right"))
    assert found[0, 1, 3].isnan()
    assert found.isnan().sum() == 1


def test_rows_that_see_nothing_are_nan(entropy_of):
    q, k = draw(2, 2, 6, 8), draw(2, 2, 6, 8, seed=1)
    mask = padding([0, 2], 6, "left")
    found = entropy_of(q, k, mask, causal=True)
    assert found[0].isnan().all()
    assert found[1].isnan().sum(-1).tolist() == [4, 4]
    rows = attention_rows(q, k, mask, causal=True)
    assert (rows.max_logit[0] == -INF).all()
    assert (rows.logsumexp[0] == -INF).all()


def test_no_keys_at_all(entropy_of):
    assert entropy_of(draw(2, 2, 3, 8), draw(2, 2, 0, 8)).isnan().all()


def test_padded_keys_do_not_matter(entropy_of):
    q, k = draw(1, 2, 9, 8), draw(1, 2, 9, 8, seed=1)
    other = k.clone()
    other[:, :, 5:] = 1e4
    mask = padding([5], 9, "right")
    assert torch.equal(entropy_of(q, k, mask), entropy_of(q, other, mask))


def test_fused_call_is_taken_on_this_device():
    assert module._fused_entropy(torch.device("cpu"), torch.float32) is module._fused_cpu


@pytest.mark.parametrize(
    "broken", [lambda *args: args[0][..., 0], lambda *args: torch.ops.aten._no_such_call()]
)
def test_a_fused_call_that_is_missing_or_wrong_is_not_used(monkeypatch, broken):
    monkeypatch.setattr(module, "_fused_cpu", broken)
    q, k = draw(1, 2, 9, 8), draw(1, 2, 9, 8, seed=1)
    module._fused_entropy.cache_clear()
    try:
        assert module._fused_entropy(torch.device("cpu"), torch.float32) is None
        assert torch.equal(attention_entropy(q, k), attention_rows(q, k).entropy)
    finally:
        module._fused_entropy.cache_clear()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, padding([45, 30], 45, "right"), padding([45, 30], 45, "left")])
def test_cuda_equals_brute_force(entropy_of, dtype, causal, mask):
    q, k = draw(2, 2, 45, 16).to(dtype), draw(2, 2, 45, 16, seed=1).to(dtype)
    found = entropy_of(q.cuda(), k.cuda(), None if mask is None else mask.cuda(), causal).cpu().double()
    torch.testing.assert_close(found, brute_entropy(q, k, mask, causal), atol=5e-6, rtol=0, equal_nan=True)
    assert module._fused_entropy(torch.device("cuda", 0), torch.float32) is module._fused_cuda


@pytest.mark.parametrize(
    ("k", "mask", "causal", "message"),
    [
        (draw(1, 2, 4, 7), None, False, "want"),
        (draw(1, 2, 4, 8), torch.zeros(1, 5, dtype=torch.bool), False, "key_padding_mask"),
        (draw(1, 2, 4, 8), None, True, "as many queries as keys"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(entropy_of, k, mask, causal, message):
    with pytest.raises(ValueError, match=message):
        entropy_of(draw(1, 2, 3, 8), k, mask, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_visible_keys_counts_the_mask(side, causal):
    mask = padding([5, 3, 0], 5, side)
    visible = brute_logits(draw(3, 1, 5, 4), draw(3, 1, 5, 4, seed=1), mask, causal, 1.0) > -INF
    assert torch.equal(visible_keys(5, 5, mask, causal), visible.sum(-1).squeeze(1))


def test_visible_keys_without_a_mask():
    assert visible_keys(3, 7).tolist() == [[7, 7, 7]]
    assert visible_keys(3, 3, causal=True).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_max_logit_over_visible_pairs_and_real_queries(side, causal):
    q, k = draw(3, 2, 30, 8), draw(3, 2, 30, 8, seed=1)
    mask = padding([30, 12, 0], 30, side)
    real = brute_logits(q, k, mask, causal, 0.5).masked_fill(mask[:, None, :, None], -INF)
    found = max_logit(q, k, mask, causal, 0.5, query_padding_mask=mask)
    torch.testing.assert_close(found.double(), real.amax((0, 2, 3)), atol=2e-6, rtol=0)
    rows = attention_rows(q, k, mask, causal, 0.5).max_logit
    assert torch.equal(largest_per_head(rows, visible_keys(30, 30, mask, causal), mask), found)


def test_max_logit_of_nothing_is_minus_infinity_and_nan_shows():
    q, k = draw(1, 2, 4, 8), draw(1, 2, 4, 8, seed=1)
    assert max_logit(q, k, torch.ones(1, 4, dtype=torch.bool)).tolist() == [-INF, -INF]
    q[0, 1, 2, 0] = float("nan")
    found = max_logit(q, k)
    assert found[0].isfinite()
    assert found[1].isnan()


def test_statistics_count_every_real_row_once():
    """Sentence 1: log 2 (2 keys), 0 (1 key), NaN (2 keys); 2: log 3 (3 keys), unseen, padded query."""
    nan = float("nan")
    entropy = torch.tensor([[[math.log(2), 0.0, nan]], [[math.log(3), nan, 0.5]]])
    visible = torch.tensor([[2, 1, 2], [3, 0, 2]])
    queries = torch.tensor([[False, False, False], [False, False, True]])
    found = entropy_statistics(entropy, visible, queries)
    assert found.entropy_sum.item() == pytest.approx(math.log(6))
    assert found.rows.item() == 3
    assert found.normalised_sum.item() == pytest.approx(2)
    assert found.normalised_rows.item() == 2
    assert found.unseen_rows.item() == 1
    assert found.nonfinite_rows.item() == 1
    assert found.minimum.item() == 0


def test_statistics_add_up_over_micro_batches():
    q, k = draw(4, 2, 10, 8), draw(4, 2, 10, 8, seed=1)
    mask = padding([10, 7, 3, 1], 10, "right")

    def statistics(rows):
        entropy = attention_entropy(q[rows], k[rows], mask[rows])
        return entropy_statistics(entropy, visible_keys(10, 10, mask[rows]), mask[rows])

    whole, first, second = statistics(slice(None)), statistics(slice(0, 1)), statistics(slice(1, 4))
    for name in set(whole._fields) - {"minimum"}:
        torch.testing.assert_close(getattr(first, name) + getattr(second, name), getattr(whole, name))
    assert torch.equal(torch.minimum(first.minimum, second.minimum), whole.minimum)
    assert whole.rows.tolist() == [21, 21]
    assert whole.normalised_rows.tolist() == [20, 20]


def test_statistics_of_uniform_attention():
    entropy = attention_entropy(torch.zeros(2, 3, 6, 4), draw(2, 3, 6, 4), causal=True)
    found = entropy_statistics(entropy, visible_keys(6, 6, causal=True))
    assert found.normalised_rows.tolist() == [10, 10, 10]
    assert (found.normalised_sum / found.normalised_rows).tolist() == pytest.approx([1, 1, 1], abs=1e-6)


def test_entropy_from_weights():
    found = entropy_from_weights(torch.tensor([[0.75, 0.25], [1.0, 0.0], [0.0, 0.0]]))
    assert found[:2].tolist() == pytest.approx([math.log(4) - 0.75 * math.log(3), 0.0])
    assert found[2].isnan()


def test_memory_does_not_grow_with_the_square_of_the_length(monkeypatch):
    """No tensor as large as an attention matrix is ever made outside the fused kernel."""
    monkeypatch.setattr(module, "CPU_BLOCK", 2**16 // torch.get_num_threads())
    length, largest = 1024, 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    q, k = draw(1, 2, length, 8), draw(1, 2, length, 8, seed=1)
    with Watch():
        attention_rows(q, k, causal=True), attention_entropy(q, k), max_logit(q, k)
    assert 0 < largest <= length**2 // 4
