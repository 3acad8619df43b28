"""Every accepted file gives the same sentences in the same order; everything else is refused, and named."""

import random

import pytest

from speech_mt.errors import InputError
from speech_mt.scoring.hypotheses import read_parallel

REFERENCES = ["erste Zeile", "zweite Zeile", "dritte Zeile"]
HYPOTHESES = ["first line", "second line", "third line"]
LOG = "2026-01-01 12:00:00 | INFO | fairseq_cli.generate | loading model(s)\n"
END = "Generate test with beam=5: BLEU4 = 1.00\n"


def block(i, hypothesis, reference=None, others=()):
    lines = [f"S-{i}\tsource {i}"] + ([f"T-{i}\t{reference}"] if reference is not None else [])
    for text in (hypothesis, *others):
        lines += [f"H-{i}\t-0.25\ttokens of {text}", f"D-{i}\t-0.25\t{text}", f"P-{i}\t-0.1 -0.2"]
    return "".join(line + "\n" for line in lines)


@pytest.fixture
def write(tmp_path):
    def write(content, name="hyp.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def ref(write):
    return write("".join(f"{line}\n" for line in REFERENCES), "ref.txt")


def generate_output(order=(2, 0, 1)):
    return LOG + "".join(block(i, HYPOTHESES[i], REFERENCES[i]) for i in order) + END


def test_generate_output_is_sorted_by_id_in_any_batch_order(write):
    ids = list(range(50))
    random.Random(0).shuffle(ids)
    text = read_parallel(write("".join(block(i, f"hyp {i}", f"ref {i}") for i in ids)))
    assert text.hypotheses == [f"hyp {i}" for i in range(50)]
    assert text.references == [[f"ref {i}" for i in range(50)]]


def test_captured_stdout_with_log_lines_is_recognised_and_its_own_targets_are_the_reference(write):
    text = read_parallel(write(generate_output()))
    assert text.hypotheses == HYPOTHESES
    assert text.references == [REFERENCES]
    assert text.ids == ["D-0", "D-1", "D-2"]


def test_tokens_are_used_where_there_is_no_detokenised_line(write, ref):
    content = "".join(line + "\n" for line in generate_output().splitlines() if not line.startswith("D-"))
    text = read_parallel(write(content), [ref])
    assert text.hypotheses == [f"tokens of {line}" for line in HYPOTHESES]
    assert text.provenance["hypotheses"].startswith("H- lines")


def test_the_first_of_each_nbest_list_is_kept_and_the_rest_counted(write):
    content = block(1, "best", "ref 1", ["other"]) + block(0, "good", "ref 0", ["worse", "worst"])
    text = read_parallel(write(content))
    assert text.hypotheses == ["good", "best"]
    assert "3 others" in text.provenance["n-best lists"]


def test_empty_hypotheses_and_tabs_in_text_survive(write):
    text = read_parallel(write("T-0\ta\nD-0\t-1.0\t\nT-1\tb\nD-1\t-1.0\tone\ttwo\nT-2\tc\nD-2\t-inf\n"))
    assert text.hypotheses == ["", "one\ttwo", ""]


@pytest.mark.parametrize(
    "content",
    [
        b"first line\nsecond line\nthird line\n",
        b"first line\nsecond line\nthird line",
        b"first line\r\nsecond line\r\nthird line\r\n",
        b"\xef\xbb\xbffirst line\nsecond line\nthird line\n",
    ],
    ids=["LF", "no final newline", "CRLF", "byte order mark"],
)
def test_plain_text_is_the_same_whatever_ends_its_lines(write, ref, content):
    assert read_parallel(write(content), [ref]).hypotheses == HYPOTHESES


def test_crlf_generate_output_equals_lf(write):
    assert read_parallel(write(generate_output().replace("\n", "\r\n"))).hypotheses == HYPOTHESES


def test_only_a_newline_ends_a_line(write, ref):
    lines = ["a\u2028b", "", "c\u0085d\x0be\x0cf"]
    assert read_parallel(write("\n".join(lines) + "\n"), [ref]).hypotheses == lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"gut\nStra\xdfe\nja\n", r"hyp.txt line 2 is not UTF-8: byte 5 is 0xDF"),
        (b"a\nb\rc\nd\n", r"line 2 has a carriage return \(0x0D\) at character 2"),
        (b"a\nb\0c\nd\n", r"line 2 has a NUL character"),
        (b"", r"hyp.txt is empty"),
        (LOG.encode(), r"log without results: fairseq-generate has not finished, or ran with --quiet"),
        (b"a\nb\n", r"2 hypotheses \(.*hyp.txt\) but 3 references \(.*ref.txt\)"),
        (b"T-0\ta\n", r"no D- or H- lines"),
        (b"T-0\ta\nD-0\t-1\tStra\xdfe\n", r"line 2 is not UTF-8: byte 12 is 0xDF"),
        (b"T-0\ta\nD-0\ttext\n", r"line 2: D-0 has 'text' in place of its score"),
        (b"x\r 50%|##  | 1/2\rD-0\t-1\ta\nD-1\t-1\tb\n", r"line 1: a progress bar runs into a result"),
        ("".join(block(i, "x") for i in (0, 2, 3)).encode(), r"D-1 is missing \(1 of ids 0 to 3 are\)"),
        (block(1, "x", "r").encode(), r"T-0 is missing .*: it has no end: fairseq-generate has not finished"),
        ((block(1, "x", "r") + END).encode(), r"T-0 is missing .* left out the end of the last batch"),
        (b"T-0\tr\nD-0\t-1\tcut he", r"ends in the middle of line 2: fairseq-generate has not finished"),
        ((block(0, "x", "r") + "T-1\tr\n").encode(), r"2 T- lines but 1 D- lines"),
        ((generate_output() + generate_output()).encode(), r"a second T-2: .* more than one run"),
        (b"D-0\t-1\ta\nD-1\t-1\tb\nD-0\t-1\tc\n", r"line 3: a second D-0"),
    ],
)
def test_what_cannot_be_read_safely_is_refused_by_name(write, ref, content, message):
    with pytest.raises(InputError, match=message):
        read_parallel(write(content), [ref])


def test_bytes_of_lines_that_are_not_read_do_not_matter(write):
    content = b"WARNING: caf\xe9\r\r|bar|\n" + generate_output().encode().replace(b"source", b"Stra\xdfe")
    assert read_parallel(write(content)).hypotheses == HYPOTHESES


def test_plain_text_without_reference_is_refused(write):
    with pytest.raises(InputError, match="name the reference file with --ref"):
        read_parallel(write("a\n"))


def test_a_reference_file_of_hypotheses_is_refused(write):
    with pytest.raises(InputError, match="no T- lines: there is no reference"):
        read_parallel(write("a\n"), [write("D-0\t-1\ta\n", "ref.txt")])


def test_generate_output_serves_as_reference_for_another_system(write):
    other = write("one\ntwo\nthree\n", "other.txt")
    assert read_parallel(other, [write(generate_output())]).references == [REFERENCES]


def test_two_runs_on_different_test_sets_are_not_paired(write):
    one, two = write(generate_output()), write(generate_output().replace("dritte", "vierte"), "two.txt")
    with pytest.raises(InputError, match="hyp.txt and T- lines of .*two.txt differ"):
        read_parallel(one, [two])


TRANSCRIPTS = "84-121123-0001 HE SAID SO\n84-121123-0000\n84-121123-0002 GO\n"


def test_librispeech_transcripts_keep_empty_utterances_and_name_them(write):
    text = read_parallel(write("a\nb\nc\n"), [write(TRANSCRIPTS, "84-121123.trans.txt")])
    assert text.references == [["HE SAID SO", "", "GO"]]
    assert text.ids == ["84-121123-0001", "84-121123-0000", "84-121123-0002"]


def test_two_files_with_utterance_ids_are_paired_by_id(write):
    hypotheses = "id\ttext\n84-121123-0000\tzero\n84-121123-0001\tone\n84-121123-0002\ttwo\n"
    text = read_parallel(write(hypotheses), [write(TRANSCRIPTS, "ref.trans.txt")])
    assert text.hypotheses == ["zero", "one", "two"]
    assert text.references == [["", "HE SAID SO", "GO"]]


def test_an_utterance_without_counterpart_is_named(write):
    hypotheses = write("84-121123-0001 a\n84-121123-0000 b\n84-121123-0009 c\n")
    with pytest.raises(InputError, match="lacks 1 utterances of .*hyp.txt, first 84-121123-0009"):
        read_parallel(hypotheses, [write(TRANSCRIPTS, "ref.trans.txt")])


@pytest.mark.parametrize("column", ["text", "tgt_text"])
def test_manifest_text_is_verbatim_in_row_order(write, column):
    manifest = write(f'id\taudio\t{column}\nu2\ta.flac\tsay "hi"\nu1\tb.flac\tnull\nu0\tc.flac\tNA\n', "m.tsv")
    text = read_parallel(write("".join(block(i, "x") for i in (1, 0, 2))), [manifest])
    assert text.references == [['say "hi"', "null", "NA"]]
    assert text.ids == ["u2", "u1", "u0"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("id\ttext\nu1\ta\tb\n", "line 2 has 3 tab-separated fields, its header has 2"),
        ("id\ttext\nu1\n", "line 2 has 1 tab-separated fields"),
        ("id\ttext\n", "a header and no rows"),
        ("id\ttext\nu1\ta\nu1\tb\n", "a second utterance u1"),
        ("84-1-0001 A\n84-1-0001 B\n", "a second utterance 84-1-0001"),
        ("84-1-0001 A\n84-1-0002 B\n\n", "line 3 does not start with an utterance id"),
    ],
)
def test_broken_transcripts_are_refused_by_line(write, content, message):
    with pytest.raises(InputError, match=message):
        read_parallel(write("a\n"), [write(content, "ref.tsv")])


def test_marks_are_removed_only_from_texts_that_have_them_and_the_report_says_from_which(write, ref):
    pieces = "".join(block(i, "▁ein e ▁Zei le") for i in range(3))
    text = read_parallel(write(pieces), [ref], post_process="sentencepiece")
    assert text.hypotheses == ["eine Zeile"] * 3
    assert text.references == [REFERENCES]
    assert "D- lines" in text.provenance["marks removed"]
    assert "ref.txt" not in text.provenance["marks removed"]
    assert text.warnings == []


def test_marks_left_in_the_text_are_warned_about(write, ref):
    (warning,) = read_parallel(write("▁a ▁b\n▁c\n▁d\n"), [ref]).warnings
    assert "--post-process sentencepiece" in warning


def test_unknown_words_in_the_reference_are_warned_about(write):
    (warning,) = read_parallel(write("T-0\ta <<unk>> b\nD-0\t-1\ta b\n")).warnings
    assert "<<unk>>" in warning


def test_several_references(write, ref):
    second = write("a\nb\nc\n", "second.txt")
    assert read_parallel(write("x\ny\nz\n"), [ref, second]).references == [REFERENCES, ["a", "b", "c"]]
