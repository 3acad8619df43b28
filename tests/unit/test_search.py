"""Options of the search from Python are those of fairseq-generate, and checked as there."""

import math

import pytest

from speech_mt.errors import InputError
from speech_mt.inference.search import search_options


def test_what_is_not_given_is_as_in_fairseq_generate():
    options = search_options({"lenpen": 0.6, "beam": 4})
    assert (options.beam, options.lenpen, options.max_len_b, options.temperature) == (4, 0.6, 200, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bem": 3}, r"no option bem of the search: did you mean beam"),
        ({"beam": 0}, "--beam 0: has to be at least 1"),
        ({"beam": "wide"}, r"beam 'wide': Value 'wide' .*Integer"),
        ({"temperature": 0}, r"--temperature 0\.0: has to be above 0"),
        ({"max_len_a": math.nan}, "--max-len-a nan: has to be at least 0"),
        ({"lenpen": math.inf}, "--lenpen inf: has to be finite"),
    ],
)
def test_what_the_search_cannot_do_is_named(options, message):
    with pytest.raises(InputError, match=message):
        search_options(options)
