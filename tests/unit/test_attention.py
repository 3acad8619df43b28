"""MultiheadAttention: the function, its masks, decoding step by step, and that whoever watches changes nothing."""

import math

import pytest
import torch
from torch import nn

from speech_mt.errors import InputError
from speech_mt.modules.attention import MultiheadAttention, visible
from speech_mt.reparam import sigma_reparam


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return MultiheadAttention(16, 4).eval()


def explicit(attention, query, key, mask):
    """softmax(Q K^T / sqrt(d)) V written out; mask (B, T, S) True where visible."""
    heads = []
    q, k, v = attention.q_proj(query), attention.k_proj(key), attention.v_proj(key)
    for h in range(attention.num_heads):
        part = slice(4 * h, 4 * h + 4)
        logits = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(4)
        heads.append(logits.masked_fill(~mask, -math.inf).softmax(-1) @ v[..., part])
    return attention.out_proj(torch.cat(heads, -1))


def test_matches_the_definition_with_padding(attention):
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    out, _ = attention(x, key_padding_mask=padding)
    torch.testing.assert_close(out, explicit(attention, x, x, ~padding[:, None, :].expand(2, 5, 5)))


def test_matches_the_definition_causal_with_left_padding(attention):
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [True, True, False, False, False]])
    mask = ~padding[:, None, :] & torch.ones(5, 5, dtype=torch.bool).tril()
    out, _ = attention(x, key_padding_mask=padding, causal=True)
    real = ~padding
    torch.testing.assert_close(out[real], explicit(attention, x, x, mask)[real])


def test_cross_attention_and_its_weights(attention):
    x, y = torch.randn(2, 3, 16), torch.randn(2, 6, 16)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    out, weights = attention(x, y, key_padding_mask=padding, need_weights=True)
    torch.testing.assert_close(out, explicit(attention, x, y, ~padding[:, None, :].expand(2, 3, 6)))
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 3))
    assert (weights[1, :, :, 4:] == 0).all()


def test_future_does_not_leak(attention):
    x = torch.randn(1, 6, 16)
    before, _ = attention(x, causal=True)
    x[:, 4:] = torch.randn(1, 2, 16)
    after, _ = attention(x, causal=True)
    torch.testing.assert_close(before[:, :4], after[:, :4])


def test_visible_is_aligned_to_the_last_query():
    assert visible(None, True, 2, 4).tolist() == [[True, True, True, False], [True] * 4]
    assert visible(None, True, 1, 4) is None
    assert visible(None, False, 3, 3) is None


def test_decoding_step_by_step_equals_the_full_pass_under_reordering(attention):
    x = torch.randn(3, 5, 16)
    order = torch.tensor([2, 0, 0])
    state = {}
    for t in range(3):
        attention(x[:, t : t + 1], incremental_state=state)
    attention.reorder_incremental_state(state, order)
    reordered = torch.cat([x[order, :3], x[:, 3:]], dim=1)
    steps = [attention(reordered[:, t : t + 1], incremental_state=state)[0] for t in (3, 4)]
    full, _ = attention(reordered, causal=True)
    torch.testing.assert_close(torch.cat(steps, 1), full[:, 3:])


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_one_query_without_gradient_is_the_fused_function_and_finite_where_nothing_is_visible(softcap):
    torch.manual_seed(0)
    attention = MultiheadAttention(16, 4, static_kv=True, softcap=softcap).eval()
    x, y = torch.randn(3, 1, 16), torch.randn(3, 6, 16)
    padding = torch.tensor([[False] * 6, [True] * 2 + [False] * 4, [True] * 6])
    fused, _ = attention(x, y, key_padding_mask=padding)  # with gradient
    with torch.no_grad():
        for state in (None, {}):
            products, _ = attention(x, y, key_padding_mask=padding, incremental_state=state)
            torch.testing.assert_close(products[:2], fused[:2])
            assert products.isfinite().all()


def test_static_keys_are_projected_once():
    torch.manual_seed(0)
    cross = MultiheadAttention(8, 2, static_kv=True).eval()
    source, state = torch.randn(2, 4, 8), {}
    first, _ = cross(torch.ones(2, 1, 8), source, incremental_state=state)
    cross.k_proj.weight.data.zero_()
    again, _ = cross(torch.ones(2, 1, 8), source, incremental_state=state)
    assert torch.equal(first, again)
    cross.reorder_incremental_state(state, torch.tensor([1, 1]))  # beams of a sentence: nothing moves
    assert torch.equal(cross(torch.ones(2, 1, 8), source, incremental_state=state)[0], first)


@pytest.mark.parametrize("projection", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_fused_path_sees_gamma(attention, projection):
    x = torch.randn(1, 4, 16)
    names = ["k_proj.weight", "v_proj.weight", "q_proj.weight", "out_proj.weight"]
    assert sigma_reparam(attention) == names
    before, _ = attention(x)
    attention.sigma_reparam.gamma.data[names.index(f"{projection}.weight")] *= 2
    after, _ = attention(x)
    assert (before - after).abs().max() > 1e-3


def test_observer_sees_heads_before_dropout_and_changes_nothing():
    torch.manual_seed(0)
    attention = MultiheadAttention(16, 4, dropout=0.5)
    x, seen = torch.randn(2, 3, 16), []
    torch.manual_seed(1)
    plain, _ = attention(x)
    attention.observer = lambda module, q, k, mask, causal: seen.append((q, k, mask, causal))
    torch.manual_seed(1)
    watched, _ = attention(x)
    assert torch.equal(plain, watched)
    ((q, k, mask, causal),) = seen
    assert q.shape == k.shape == (2, 4, 3, 4)
    assert not q.requires_grad
    assert (mask, causal) == (None, False)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="10 is not a multiple of 4 heads"):
        MultiheadAttention(10, 4)


def test_no_bias():
    assert not [n for n, _ in MultiheadAttention(8, 2, bias=False).named_parameters() if "bias" in n]
    assert isinstance(MultiheadAttention(8, 2).q_proj, nn.Linear)


def test_softcap_bounds_the_logits():
    torch.manual_seed(0)
    attention = MultiheadAttention(16, 4, softcap=2.0).eval()
    plain = MultiheadAttention(16, 4).eval()
    plain.load_state_dict(attention.state_dict())
    x = 10 * torch.randn(1, 5, 16)
    _, capped = attention(x, need_weights=True)
    _, free = plain(x, need_weights=True)
    spread_capped, spread_free = (w.log().amax(-1) - w.log().amin(-1) for w in (capped, free))  # of logits in a row
    assert spread_capped.max() <= 4.0 < spread_free.max()


def test_softcap_output_is_its_weights_times_values_and_decoding_agrees():
    torch.manual_seed(0)
    attention = MultiheadAttention(16, 4, softcap=1.0).eval()
    x = torch.randn(2, 4, 16)
    full, weights = attention(x, causal=True, need_weights=True)
    values = attention._heads(attention.v_proj(x))
    torch.testing.assert_close(full, attention.out_proj((weights @ values).transpose(1, 2).flatten(2)))
    state = {}
    steps = torch.cat([attention(x[:, t : t + 1], incremental_state=state)[0] for t in range(4)], 1)
    torch.testing.assert_close(steps, full)


def test_qk_norm_makes_logits_independent_of_the_projections_scale():
    torch.manual_seed(0)
    attention = MultiheadAttention(16, 4, qk_norm=True, bias=False).eval()
    x = torch.randn(2, 3, 16)
    before, _ = attention(x)
    attention.q_proj.weight.data.mul_(30)
    attention.k_proj.weight.data.mul_(0.3)
    torch.testing.assert_close(attention(x)[0], before, rtol=1e-3, atol=1e-4)
    state = {}
    attention(x[:, :1], incremental_state=state)
    step, _ = attention(x[:, 1:2], incremental_state=state)
    torch.testing.assert_close(step, attention(x, causal=True)[0][:, 1:2])


def test_qk_clip_brings_the_largest_logit_of_hot_heads_down_to_tau_after_the_update():
    torch.manual_seed(0)
    attention = MultiheadAttention(16, 4, qk_clip=3.0)
    attention.q_proj.weight.data[:4].mul_(40)  # the first head is hot
    x = torch.randn(2, 5, 16)
    attention.set_num_updates(1)
    before, _ = attention(x)
    hot = attention.qk_clip.largest.clone()
    assert hot[0] > 3.0 > hot[1:].max()
    cold = attention.q_proj.weight[4:].clone()
    attention.set_num_updates(1)  # another micro-batch of the same update
    assert torch.equal(attention(x)[0], before)
    attention.set_num_updates(2)
    attention(x)
    torch.testing.assert_close(attention.qk_clip.largest[0], torch.tensor(3.0))
    assert torch.equal(attention.q_proj.weight[4:], cold)
    assert not [key for key in attention.state_dict() if "qk_clip" in key]


def test_qk_clip_refuses_half_precision():
    attention = MultiheadAttention(16, 4, qk_clip=3.0).half()
    with pytest.raises(InputError, match="--qk-clip needs float32"):
        attention.set_num_updates(1)
