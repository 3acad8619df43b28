"""The bidirectional text encoder: fairseq's masked_lm criterion drives it; vectors do not depend on padding."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from speech_mt.errors import InputError
from speech_mt.models.config import SpectralMaskedLMConfig
from speech_mt.models.masked_lm import SpectralMaskedLM

from .conftest import SIZES

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "oversmoothing"))

import text_encoder  # noqa: E402


@pytest.fixture
def masked_lm(task):
    def build(**options):
        torch.manual_seed(1)
        return SpectralMaskedLM.build_model(SpectralMaskedLMConfig(**(SIZES | options)), task)

    return build


TOKENS = torch.tensor([[0, 5, 6, 7, 2], [0, 8, 2, 1, 1]])


def test_the_masked_lm_criterion_trains_it(masked_lm, task):
    from fairseq.criterions.masked_lm import MaskedLmConfig, MaskedLmLoss

    model = masked_lm(value_spectrum="sharpen", token_mixing="feat_scale")
    target = torch.full_like(TOKENS, 1)
    target[0, 2], target[1, 1] = 9, 10
    sample = {"net_input": {"src_tokens": TOKENS, "src_lengths": torch.tensor([5, 3])}, "target": target}
    sample |= {"nsentences": 2, "ntokens": 8}
    criterion = MaskedLmLoss(MaskedLmConfig(tpu=False), SimpleNamespace(target_dictionary=task.target_dictionary))
    loss, size, _ = criterion(model, sample)
    loss.backward()
    scores = model(TOKENS)[0]
    expected = -(scores[0, 2].log_softmax(-1)[9] + scores[1, 1].log_softmax(-1)[10])
    torch.testing.assert_close(loss, expected)
    assert size == 2
    assert all(p.grad is not None for p in model.parameters())
    assert model.lm_head.weight is model.encoder.embed_tokens.weight


def test_it_sees_both_sides(masked_lm):
    model = masked_lm().eval()
    changed = TOKENS.clone()
    changed[0, 3] = 20
    before, after = model(TOKENS)[0][0], model(changed)[0][0]
    assert (before - after).abs().amax(-1).min() > 1e-4


def test_a_sentences_vector_is_the_mean_of_its_tokens_alone_or_padded(masked_lm):
    model = masked_lm(token_mixing="attn_scale,feat_scale,neutreno", value_spectrum="smooth").eval()
    alone = model.sentence_vectors(TOKENS[1:, :3])
    torch.testing.assert_close(model.sentence_vectors(TOKENS)[1:], alone, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(alone, model.features(TOKENS[1:, :3])[0].mean(1))


# -- the example ------------------------------------------------------------------------------------------------


def test_gold_similarity_by_hand():
    one, other = (text_encoder.Statement(holdings) for holdings in ((("anna", 42), ("bob", 7)), (("anna", 142),)))
    assert one.text() == "anna has forty two , bob has seven"
    assert text_encoder.similarity(one, one) == 5.0
    assert text_encoder.similarity(one, other) == pytest.approx(5 * (1 + 2 / 3) / 2 / 2)
    assert text_encoder.similarity(other, text_encoder.Statement((("bob", 142),))) == 0.0


def test_the_answer_to_a_question_is_its_persons_number():
    for question in text_encoder.draw_questions(50, 0):
        answer = " ".join(question.text.split()[question.first : question.last + 1])
        assert f"{question.question.split()[-1]} has {answer}" in question.text.split(" , ")


def test_a_reader_learns_where_answers_are(masked_lm, dictionary):
    """Of its own questions, in the words of another dictionary: the rare words become one."""
    model = masked_lm()
    sentences = text_encoder.Sentences(model.encoder.dictionary)
    questions = [text_encoder.Question("w1 w2 w3 w4", "w9", i, i) for i in range(4)] * 10
    for i, question in enumerate(questions):
        text = ["w1", "w2", "w3", "w4"]
        text[question.first] = "w30"
        questions[i] = text_encoder.Question(" ".join(text), "w9", question.first, question.last)
    reader = text_encoder.SpanReader(model)
    text_encoder.train_reader(reader, sentences, questions, 40, seed=1)
    assert text_encoder.read_answers(reader, sentences, questions) == (100.0, 100.0)


def test_pairs_of_ones_own(tmp_path):
    (tmp_path / "pairs.tsv").write_text("4.5\tone two\tone three\n0\ta\tb\n")
    assert text_encoder.read_pairs(tmp_path / "pairs.tsv")[0] == (4.5, "one two", "one three")
    (tmp_path / "bad.tsv").write_text("4.5\tone two\tone three\n4.5 a b\n")
    with pytest.raises(InputError, match=r"bad\.tsv, line 2: not a score"):
        text_encoder.read_pairs(tmp_path / "bad.tsv")


def test_drawn_pairs_are_of_all_degrees():
    scores = [score for score, *_ in text_encoder.draw_pairs(200, 0)]
    assert min(scores) == 0.0
    assert sum(2 < score < 5 for score in scores) > 30
