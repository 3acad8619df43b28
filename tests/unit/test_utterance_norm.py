"""One mean and one variance an utterance, over its real frames and all channels."""

import torch

from speech_mt.modules.utterance_norm import UtteranceNorm


def test_real_frames_have_mean_0_and_variance_1_and_padding_is_0():
    torch.manual_seed(0)
    x = 3 + 5 * torch.randn(2, 7, 4)
    y = UtteranceNorm()(x, torch.tensor([7, 4]))
    for row, length in zip(y, (7, 4), strict=True):
        torch.testing.assert_close(row[:length].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
        torch.testing.assert_close(row[:length].var(correction=0), torch.tensor(1.0))
        assert not row[length:].any()
    # one pair of numbers for all channels: they keep their differences
    torch.testing.assert_close(y[0] - y[0, :1], (x[0] - x[0, :1]) / x[0].std(correction=0), rtol=1e-5, atol=1e-5)


def test_an_utterance_is_the_same_alone_and_padded_with_anything():
    x = torch.randn(1, 4, 3)
    padded = torch.cat([x, torch.full((1, 2, 3), 1e4)], dim=1)
    norm = UtteranceNorm()
    with torch.no_grad():
        norm.weight.fill_(2.0)
        norm.bias.fill_(0.5)
    alone, together = norm(x, torch.tensor([4])), norm(padded, torch.tensor([4]))
    torch.testing.assert_close(together[:, :4], alone)
    assert not together[:, 4:].any()


def test_silence_and_half_precision_are_finite():
    norm = UtteranceNorm()
    assert torch.equal(norm(torch.full((1, 5, 3), 7.0), torch.tensor([5])), torch.zeros(1, 5, 3))
    y = norm.half()(torch.full((1, 500, 80), 300.0).half() + torch.randn(1, 500, 80).half(), torch.tensor([500]))
    assert y.dtype == torch.float16
    assert y.isfinite().all()
    assert norm(torch.randn(1, 3, 2), torch.tensor([0])).isfinite().all()
