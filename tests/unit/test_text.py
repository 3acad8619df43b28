"""A parallel text stays aligned line by line, faults are named by file, line and byte, and all is counted."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from speech_mt.data.text import SideReport, check_parallel, is_empty, overlap, read_lines
from speech_mt.errors import InputError


def corpus(folder: Path, source: bytes, target: bytes) -> tuple[Path, Path]:
    paths = folder / "train.de", folder / "train.en"
    for path, content in zip(paths, (source, target), strict=True):
        path.write_bytes(content)
    return paths


def read(path: Path) -> tuple[list[str], SideReport]:
    report = SideReport(str(path))
    return list(read_lines(path, report)), report


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"gut\nStra\xdfe\n", r"train\.de line 2 is not UTF-8 \(byte 0xDF, 5 bytes into the line\)"),
        ("gut\n".encode("utf-16"), r"train\.de line 1 is not UTF-8 \(byte 0xFF, 1 bytes"),
        (b"gut\n\nvo\0ll\n", r"train\.de line 3 holds a NUL \(byte 0x00, 3 bytes"),
        (
            b"eins\rzwei\n",
            r"train\.de line 1 holds a carriage return without a line feed \(byte 0x0D, 5 bytes",
        ),
        (b"eins\n\xc3\xa4\r\r\n", r"train\.de line 2 holds a carriage return .* 3 bytes"),
        (b"eins\n\xef\xbb\xbfzw\xff\n", r"train\.de line 2 is not UTF-8 \(byte 0xFF, 3 bytes"),
    ],
    ids=["Latin-1", "UTF-16", "NUL", "lone CR", "CR CR LF", "after a byte-order mark"],
)
def test_what_breaks_alignment_or_decoding_is_refused_by_name(tmp_path, content, found):
    source, target = corpus(tmp_path, content, b"one\ntwo\nthree\n")
    with pytest.raises(InputError, match=found):
        check_parallel(source, target, write_to=(tmp_path / "out.de", tmp_path / "out.en"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "train.de",
        "train.en",
    ]  # nothing half-written


def test_crlf_and_byte_order_mark_change_nothing_but_the_counts(tmp_path):
    plain, _ = corpus(tmp_path, "ä b\n\nc".encode(), b"")
    lines, _ = read(plain)
    windows = tmp_path / "windows.de"
    windows.write_bytes("\ufeffä b\r\n\r\n\ufeffc".encode())
    assert read(windows) == (lines, SideReport(str(windows), lines=3, empty=1, crlf=2, byte_order_marks=2))
    assert lines == ["ä b", "", "c"]


@pytest.mark.parametrize("character", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
def test_other_line_ends_become_spaces(tmp_path, character):
    path = tmp_path / "a.de"
    path.write_bytes(f"eins{character}zwei\ndrei\n".encode())
    lines, report = read(path)
    assert lines == ["eins zwei", "drei"]
    assert (report.lines, report.inner_line_breaks) == (2, 1)


LINE = st.text(st.characters(exclude_characters="\n\r\0", exclude_categories=["Cs"]), max_size=8)


@settings(deadline=None)  # of a machine with other work
@given(st.lists(st.tuples(LINE, LINE), min_size=1, max_size=6))
def test_line_k_stays_line_k_for_every_reader(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("aligned")
    # the index of each line is in it on both sides, and survives
    marked = [(f"{a}<{k}>", f"{b}<{k}>") for k, (a, b) in enumerate(pairs)]
    source, target = corpus(
        folder,
        "".join(f"{a}\n" for a, _ in marked).encode(),
        "".join(f"{b}\n" for _, b in marked).encode(),
    )
    written = folder / "out.de", folder / "out.en"
    report = check_parallel(source, target, write_to=written)
    assert (report.pairs, report.kept) == (len(pairs), len(pairs))
    for path in written:
        for lines in (path.read_text(encoding="utf-8").splitlines(), path.read_bytes().split(b"\n")[:-1]):
            assert len(lines) == len(pairs)
        with open(path, encoding="utf-8") as text_mode:
            assert all(f"<{k}>" in line for k, line in enumerate(text_mode))


def test_empty_sides_are_dropped_from_train_and_kept_elsewhere(tmp_path):
    source, target = corpus(tmp_path, b"a\n \nc\nd\n", "A\nB\n\u200b\nD\n".encode())
    written = tmp_path / "out.de", tmp_path / "out.en"
    train = check_parallel(source, target, drop=True, write_to=written)
    assert (train.pairs, train.kept, train.empty) == (4, 2, 2)
    assert [path.read_text() for path in written] == ["a\nd\n", "A\nD\n"]
    test = check_parallel(source, target, write_to=written)
    assert (test.pairs, test.kept, test.empty) == (4, 4, 2)
    assert [path.read_text(encoding="utf-8").count("\n") for path in written] == [4, 4]
    assert (train.source.empty, train.target.empty) == (1, 1)


@pytest.mark.parametrize("line", ["", " \t", "\u00a0", "\u3000", "\u200b", "\ufeff", "\x07"])
def test_what_no_reader_can_see_is_empty(line):
    assert is_empty(line)
    assert not is_empty(line + ".")


@pytest.mark.parametrize(("source_lines", "target_lines"), [(2, 3), (4, 3), (0, 1)])
def test_unequal_line_counts_give_both(tmp_path, source_lines, target_lines):
    source, target = corpus(tmp_path, b"a\n" * source_lines, b"b\n" * target_lines)
    with pytest.raises(
        InputError, match=rf"train\.de has {source_lines} lines but .*train\.en has {target_lines}"
    ):
        check_parallel(source, target)


def test_length_limits_in_characters(tmp_path):
    # lengths (2, 4), (2, 5), (10, 9), (11, 9): ratios 2, 2.5, 1.1, 1.2; the fourth is over the maximum of 10
    source, target = corpus(
        tmp_path,
        "äö\nab\n{}\n{}\n".format("x" * 10, "x" * 11).encode(),
        b"abcd\nabcde\n" + b"yyyyyyyyy\n" * 2,
    )
    written = tmp_path / "out.de", tmp_path / "out.en"
    limits = {"max_length": 10, "max_length_ratio": 2.0}
    train = check_parallel(source, target, drop=True, write_to=written, **limits)
    assert (train.kept, train.too_long, train.bad_ratio) == (2, 1, 1)
    assert written[1].read_text() == "abcd\nyyyyyyyyy\n"
    test = check_parallel(source, target, **limits)
    assert (test.kept, test.too_long, test.bad_ratio) == (4, 1, 1)


def test_duplicates_and_overlaps_are_counted(tmp_path):
    train = check_parallel(*corpus(tmp_path, b"a\nb\na\na\n", b"A\nB\nA\nother\n"))
    assert train.duplicates == 1  # the third pair; the fourth has another translation
    test = check_parallel(*corpus(tmp_path, b"a\nb\nc\n", b"A\nnew\nC\n"))
    assert overlap(test, train) == {"pairs": 1, "sources": 2}


def test_a_text_without_a_usable_pair_is_refused(tmp_path):
    with pytest.raises(InputError, match="no usable pair: 0 of 1 pairs: 1 with an empty side"):
        check_parallel(*corpus(tmp_path, b"a\n", b"\n"), drop=True)


def test_summary_names_every_count_that_is_not_zero(tmp_path):
    source, target = corpus(tmp_path, "a\r\n\u2028b\nc\nc\n".encode(), b"A\nB\n\xef\xbb\xbfC\nC\n")
    assert check_parallel(source, target).summary() == (
        "4 of 4 pairs: 1 duplicates (kept), 1 CRLF lines in train.de, 1 lines with an inner line break in "
        "train.de (now a space), 1 byte order marks in train.en (removed)"
    )
