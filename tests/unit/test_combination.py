"""Which models, criterions and tasks go together; tests/integration/test_mistakes.py has it through the commands."""

import math
from types import SimpleNamespace

import pytest

from speech_mt.errors import InputError
from speech_mt.ranges import COUNT, FINITE, NOT_NEGATIVE, POSITIVE, PROBABILITY, Range, check_ranges


def test_an_ensemble_is_of_one_kind_and_one_length(ctc_model, s2t_model):
    from speech_mt.models.combination import check_ensemble

    ctc, shorter, s2t = ctc_model(), ctc_model(conv_strides="3,2"), s2t_model()
    check_ensemble([ctc, ctc], ["a.pt", "b.pt"])
    with pytest.raises(InputError, match=r"a\.pt is CTC, b\.pt is encoder-decoder"):
        check_ensemble([ctc, s2t], ["a.pt", "b.pt"])
    with pytest.raises(InputError, match=r"a\.pt by 4, b\.pt by 6"):
        check_ensemble([ctc, shorter], ["a.pt", "b.pt"])


@pytest.mark.parametrize(
    ("model", "reads_text"),
    [("transformer", True), ("spectral_transformer_tiny", True), ("spectral_ctc_transformer", False)]
    + [("s2t_transformer_s", False), ("s2t_conformer", False)],
)
def test_models_that_read_text_are_known(ctc_model, model, reads_text):
    import fairseq.models  # noqa: F401

    from speech_mt.models.combination import check_reads_features

    if reads_text:
        with pytest.raises(InputError, match=f"{model} reads text"):
            check_reads_features(model, "speech_manifest")
    else:
        check_reads_features(model, "speech_manifest")


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (COUNT, [1, 7, [1, 2], "[3, 4]"], [0, -4, math.nan], "at least 1"),
        (FINITE, [-1e9, 0], [math.nan, math.inf], "finite"),
        (NOT_NEGATIVE, [0, "(0.9, 0.98)"], ["1,-2", math.nan], "at least 0"),
        (NOT_NEGATIVE, [], [math.inf, "1,inf"], "finite"),
        (POSITIVE, [0.1], [0, -1.0], "above 0"),
        (PROBABILITY, [0.0, 0.99], [1.0, -0.1], "at least 0 and below 1"),
        (Range(0, 1), [0, 1], [1.5], "at least 0 and at most 1"),
    ],
)
def test_numbers_out_of_range_are_named(allowed, inside, outside, words):
    for value in inside:
        check_ranges(SimpleNamespace(some_number=value, other=None), {"some_number": allowed, "other": COUNT})
    for value in outside:
        with pytest.raises(InputError, match=f"--some-number {value}: has to be {words}$"):
            check_ranges(SimpleNamespace(some_number=value), {"some_number": allowed})


def test_what_fairseq_leaves_as_typed_is_read_as_a_number():
    ranges = {"batch_size_valid": COUNT}
    check_ranges(SimpleNamespace(batch_size_valid="100"), ranges)
    check_ranges(SimpleNamespace(batch_size_valid="${dataset.batch_size}"), ranges)
    for value in ("0", "many"):
        with pytest.raises(InputError, match=f"--batch-size-valid {value}: has to be at least 1"):
            check_ranges(SimpleNamespace(batch_size_valid=value), ranges)
