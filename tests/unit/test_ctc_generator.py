"""Decoding of CTC models in the form that fairseq expects of a generator: batches, padding, ensembles."""

import math
from functools import partial

import pytest
import torch

from speech_mt.decoding.ctc_generator import CTCGenerator, ctc_log_probs
from speech_mt.decoding.ctc_greedy import best_path
from speech_mt.errors import InputError

BLANK = 0
GREEDY = partial(best_path, blank=BLANK)


def log_probs(symbols, probability=0.7, vocabulary=4):
    """(1, frames, vocabulary): each frame gives its symbol ``probability`` and shares the rest."""
    out = torch.full((1, len(symbols), vocabulary), (1 - probability) / (vocabulary - 1))
    out[0, torch.arange(len(symbols)), torch.tensor(symbols, dtype=torch.long)] = probability
    return out.log()


class Model(torch.nn.Module):
    """Takes ``src_tokens`` (batch, frames, symbols) for logits."""

    def __init__(self, key, mask, bias=None):
        super().__init__()
        self.key, self.mask, self.bias = key, mask, bias

    def forward(self, src_tokens, src_lengths):
        logits = src_tokens if self.bias is None else self.bias
        mask = torch.arange(src_tokens.size(1)) >= src_lengths[:, None] if self.mask else None
        return {"encoder_out": logits.transpose(0, 1), self.key: mask}

    def get_normalized_probs(self, net_output, log_probs):
        assert log_probs
        return net_output["encoder_out"].log_softmax(dim=-1)


def sample(lengths):
    logits = torch.cat([log_probs([1, 0, 2, 2]), log_probs([3, 3, 1, 2])])
    net_input = {"src_tokens": logits, "src_lengths": torch.tensor(lengths), "prev_output_tokens": None}
    return {"net_input": net_input}


def tokens(hypotheses):
    assert all(len(one) == 1 for one in hypotheses)
    return [one[0]["tokens"].tolist() for one in hypotheses]


@pytest.mark.parametrize("key", ["padding_mask", "encoder_padding_mask"])
def test_padding_is_not_decoded(key):
    generator = CTCGenerator(GREEDY, {1, 2})
    assert tokens(generator.generate([Model(key, mask=True)], sample([4, 2]))) == [[1, 2], [3]]
    assert tokens(generator.generate([Model(key, mask=False)], sample([4, 4]))) == [[1, 2], [3, 1, 2]]


def test_an_ensemble_averages_probabilities():
    # 0.7 and 0.1 for the first model's symbol, 0.1 and 0.9 for the second's: 0.4 against 0.5 on average
    second = log_probs([3, 3, 3, 3], probability=0.9).expand(2, -1, -1)
    models = [Model("padding_mask", True), Model("padding_mask", True, bias=second)]
    (first,), _ = CTCGenerator(GREEDY, set()).generate(models, sample([4, 4]))
    assert first["tokens"].tolist() == [3]
    assert first["score"] == pytest.approx(math.log((0.1 + 0.9) / 2))


@pytest.mark.parametrize("option", ["prefix_tokens", "constraints"])
def test_options_of_beam_search_are_refused(option):
    with pytest.raises(InputError, match="CTC decoding knows no"):
        CTCGenerator(GREEDY, set()).generate([], sample([4, 4]), **{option: torch.ones(1)})


def test_the_head_of_an_encoder_decoder_is_read_and_missed(s2t_model, speech_batch):
    model = s2t_model(ctc_weight=0.3).eval()
    log_probs, lengths = ctc_log_probs([model], speech_batch["net_input"])
    assert lengths == [15, 11]  # 60 and 41 frames, two strides of 2
    source = {key: speech_batch["net_input"][key] for key in ("src_tokens", "src_lengths")}
    (expected,) = model.encoder(**source)["ctc_logits"]
    torch.testing.assert_close(log_probs.exp(), expected.softmax(-1).transpose(0, 1))
    with pytest.raises(InputError, match="no CTC head to rescore with: .* train it with"):
        ctc_log_probs([s2t_model()], speech_batch["net_input"])
