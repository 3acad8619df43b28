"""A manifest reads back as it was written, and every fault is named by file and line."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speech_mt.data.manifest import Manifest, manifest_bytes, read_manifest, write_manifest
from speech_mt.errors import InputError

HEADER = b"id\taudio\tduration\ttext\tspeaker\n"
FIELD = st.text(st.characters(exclude_characters="\t\r\n\0", exclude_categories=["Cs"]))


def row(**fields):
    return {"id": "u1", "audio": "a.flac", "duration": 1.5, "text": "hello", "speaker": "s"} | fields


@given(st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=5))
def test_round_trip_is_identity(fields):
    rows = [row(id=f"u{k}", text=text, extra=extra) for k, (text, extra) in enumerate(fields)]
    manifest = Manifest("m.tsv", manifest_bytes("m.tsv", rows))
    assert manifest.column("text") == [text for text, _ in fields]
    assert [manifest.field(k, "extra") for k in range(len(manifest))] == [extra for _, extra in fields]


@pytest.mark.parametrize(
    "text", ['say "hi"', "null", "NA", "nan", " spaces  ", "", "\\t", "'", "日本語 🎧", "\u2028"]
)
def test_text_that_other_readers_change(tmp_path, text):
    write_manifest(tmp_path / "train.tsv", [row(text=text)])
    assert read_manifest(tmp_path / "train.tsv").row(0) == row(text=text, duration="1.5")


def test_durations_and_paths(tmp_path):
    write_manifest(tmp_path / "train.tsv", [row(id="a"), row(id="b", audio="/x/b.wav", duration=0)])
    manifest = read_manifest(tmp_path / "train.tsv")
    assert manifest.duration.dtype == np.float64
    assert manifest.duration.tolist() == [1.5, 0.0]
    assert [str(manifest.audio_path(k)) for k in range(2)] == [str(tmp_path / "a.flac"), "/x/b.wav"]
    assert manifest.where(1) == f"{tmp_path / 'train.tsv'} line 3, utterance 'b'"


def test_columns_come_in_any_order():
    manifest = Manifest("m.tsv", b"text\tspeaker\tid\tlanguage\tduration\taudio\nhi\ts\tu\ten\t2\ta.wav\n")
    assert (manifest.field(0, "id"), manifest.field(0, "language"), manifest.duration[0]) == ("u", "en", 2.0)


@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"\xef\xbb\xbf" + content,
        lambda content: content.replace(b"\n", b"\r\n"),
        lambda content: content.removesuffix(b"\n"),
    ],
    ids=["byte-order mark", "CRLF", "no newline at the end"],
)
def test_harmless_forms_of_the_same_file(change):
    content = manifest_bytes("m.tsv", [row(id="a"), row(id="b")])
    read = [Manifest("m.tsv", version).row(k) for version in (content, change(content)) for k in range(2)]
    assert read[:2] == read[2:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"id\taudio\ttext\tspeaker\nu\ta\tt\ts\n", "m.tsv line 1: no column duration"),
        (
            b"id\taudio\tduration\ttext\tspeaker\tid\n1\t2\t3\t4\t5\t6\n",
            "line 1: column 'id' appears 2 times",
        ),
        (HEADER, "m.tsv has a header and no utterance"),
        (b"", "m.tsv line 1: no column id"),
        (HEADER + b"u\ta\t1\tt\ts\nv\ta\t1\tt\n", "m.tsv line 3 has 4 fields, the header has 5"),
        (HEADER + b"u\ta\t1\tt\tt\ts\n", "m.tsv line 2 has 6 fields"),
        (HEADER + b"u\ta\t1\tt\ts\n\nv\ta\t1\tt\ts\n", "m.tsv line 3 has 1 fields"),
        (
            HEADER + b"u\ta\t1\tt\ts\nv\ta\t1\tt\ts\nu\ta\t1\tt\ts\n",
            "line 4: id 'u' is already that of line 2",
        ),
        (HEADER + b"\ta\t1\tt\ts\n", "line 2 has no id"),
        (HEADER + b"u\ta\t1\tt\ts\nv\ta\t1\tStra\xdfe\ts\n", r"line 3 is not UTF-8 \(byte 0xDF\)"),
        (HEADER + b"u\ta\t1\tt\rt\ts\n", "line 2 holds a carriage return"),
        (HEADER + b"u\ta\t1\tt\0t\ts\n", "line 2 holds a NUL"),
        (HEADER + b"u\ta\t1\tt\ts\nv\ta\tlong\tt\ts\n", "line 3, utterance 'v': duration is 'long'"),
        (HEADER + b"u\ta\t-1\tt\ts\n", "duration is '-1'"),
        (HEADER + b"u\ta\tnan\tt\ts\n", "duration is 'nan'"),
    ],
)
def test_faults_are_named(content, message):
    with pytest.raises(InputError, match=message):
        Manifest("m.tsv", content)


@pytest.mark.parametrize("character", ["\t", "\n", "\r", "\0"])
def test_what_cannot_be_written_is_refused_and_the_old_file_stays(tmp_path, character):
    path = tmp_path / "train.tsv"
    write_manifest(path, [row(id="old")])
    with pytest.raises(InputError, match="line 3, utterance 'b': text holds a"):
        write_manifest(path, [row(id="a"), row(id="b", text=f"two{character}parts")])
    assert read_manifest(path).column("id") == ["old"]
    assert [file.name for file in tmp_path.iterdir()] == ["train.tsv"]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([row(), row(id="v", extra="x")], "line 3: columns .* differ"),
        ([row(), row()], "already that of line 2"),
        ([{"id": "u"}], "no column audio"),
    ],
)
def test_writing_refuses_what_reading_would(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        write_manifest(tmp_path / "train.tsv", rows)


def test_missing_file(tmp_path):
    with pytest.raises(InputError, match="train.tsv: no such manifest"):
        read_manifest(tmp_path / "train.tsv")
