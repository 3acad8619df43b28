"""Joint CTC/attention rescoring: the probabilities, the weights, the order."""

import math
from types import SimpleNamespace

import pytest
import torch

from speech_mt.decoding.ctc_rescoring import CTCRescoringGenerator, transcript_log_probs
from speech_mt.errors import InputError

BLANK, EOS = 0, 2


def test_transcript_probabilities_by_hand():
    """Two frames: 3 is said by 33, 03 and 30; 34 by one path; nothing by 00; 33 needs three frames."""
    log_probs = torch.tensor([[0.5, 0.0, 0.0, 0.3, 0.2], [0.4, 0.0, 0.0, 0.1, 0.5]]).log()
    transcripts = [torch.tensor(t, dtype=torch.int64) for t in ([3], [3, 4], [], [3, 3])]
    expected = [0.3 * 0.1 + 0.5 * 0.1 + 0.3 * 0.4, 0.3 * 0.5, 0.5 * 0.4, 0.0]
    found = [math.exp(value) for value in transcript_log_probs(log_probs, transcripts, BLANK)]
    assert found == pytest.approx(expected)


class Attention:
    """A beam search that likes [3] more than [4]."""

    eos, normalize_scores, len_penalty, symbols_to_strip_from_output = EOS, True, 1.0, {EOS}

    def generate(self, models, sample, prefix_tokens=None, constraints=None):
        beam = [([3, EOS], -1.0), ([4, EOS], -1.5)]
        return [[{"tokens": torch.tensor(tokens), "score": torch.tensor(score)} for tokens, score in beam]]


class Model(torch.nn.Module):
    """Its CTC head hears 3 with probability 0.1 and 4 with 0.9, in the first of two frames; the second is padding."""

    decoder = None

    def encoder(self, src_tokens):
        probabilities = torch.tensor([[[0.0, 0.0, 0.0, 0.1, 0.9]], [[0.2] * 5]])
        return {"ctc_logits": [probabilities.log()], "encoder_padding_mask": [torch.tensor([[False, True]])]}


def rescored(weight, **changes):
    attention = Attention()
    vars(attention).update(changes)
    generator = CTCRescoringGenerator(attention, weight, BLANK)
    (hypotheses,) = generator.generate([Model()], {"net_input": {"src_tokens": None, "prev_output_tokens": None}})
    return [(hypothesis["tokens"].tolist(), hypothesis["score"]) for hypothesis in hypotheses]


def test_the_ctc_head_changes_the_order():
    (first, score), (second, other) = rescored(0.5)
    assert first == [4, EOS]
    assert second == [3, EOS]
    # divided by the length, as attention's scores are: 2, the end of sentence counted
    assert score == pytest.approx(0.5 * -1.5 + 0.5 * math.log(0.9) / 2)
    assert other == pytest.approx(0.5 * -1.0 + 0.5 * math.log(0.1) / 2)


def test_no_length_normalisation_if_attention_has_none():
    (_, score), _ = rescored(0.5, normalize_scores=False)
    assert score == pytest.approx(0.5 * -1.5 + 0.5 * math.log(0.9))


def test_weight_0_is_attention_and_weight_1_is_ctc():
    assert rescored(0.0) == [([3, EOS], -1.0), ([4, EOS], -1.5)]
    assert rescored(1.0)[0] == ([4, EOS], pytest.approx(math.log(0.9) / 2))


@pytest.mark.parametrize("weight", [-0.1, 1.1])
def test_the_weight_is_a_share(weight):
    with pytest.raises(InputError, match="give a weight from 0"):
        CTCRescoringGenerator(SimpleNamespace(), weight, BLANK)


def test_with_a_real_model_and_beam(s2t_model, speech_batch, dictionary):
    """Every hypothesis of the beam comes back, with CTC's probability of it mixed in."""
    from fairseq.sequence_generator import SequenceGenerator

    model = s2t_model(ctc_weight=0.3).eval()
    beam = SequenceGenerator([model], dictionary, beam_size=4, max_len_b=5)
    plain = beam.generate([model], speech_batch)
    both = CTCRescoringGenerator(beam, 0.4, BLANK).generate([model], speech_batch)
    for before, after in zip(plain, both, strict=True):
        assert sorted(h["tokens"].tolist() for h in before) == sorted(h["tokens"].tolist() for h in after)
        scores = [h["score"] for h in after]
        assert scores == sorted(scores, reverse=True)
        assert {round(float(h["score"]), 4) for h in before} != {round(s, 4) for s in scores}
