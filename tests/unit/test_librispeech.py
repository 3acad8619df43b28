"""Every kind of bad audio or transcript gives its message, and the rest of the chapter is used."""

import tarfile

import numpy as np
import pytest
import soundfile

from speech_mt.data import librispeech
from speech_mt.data.librispeech import download_subset, read_speaker, speakers
from speech_mt.errors import InputError

RATE = 16000


@pytest.fixture
def chapter(tmp_path):
    folder = tmp_path / "LibriSpeech" / "dev-clean" / "7" / "21"
    folder.mkdir(parents=True)
    return folder


def write(chapter, transcripts, samples=8000, rate=RATE, channels=1):
    """A chapter of noise with these lines of transcripts; returns the path of each line's audio."""
    (chapter / "7-21.trans.txt").write_bytes(b"".join(line + b"\n" for line in transcripts))
    generator = np.random.default_rng(0)
    paths = [chapter / f"{line.split(b' ')[0].decode()}.flac" for line in transcripts]
    for path in paths:
        soundfile.write(path, generator.uniform(-0.5, 0.5, (samples, channels)), rate)
    return paths


def only_fault(chapter):
    """The one fault of a chapter whose first utterance, 7-21-0000, is sound."""
    utterances, (fault,) = read_speaker(chapter.parent)
    assert [utterance.id for utterance in utterances] == ["7-21-0000"]
    return fault


def test_sound_utterances_keep_their_words_and_exact_durations(chapter):
    write(chapter, [b"7-21-0000 HE SAID DON'T", b"7-21-0001 YES"], samples=12345)
    utterances, faults = read_speaker(chapter.parent)
    assert not faults
    assert [(u.id, u.text, u.duration) for u in utterances] == [
        ("7-21-0000", "HE SAID DON'T", 12345 / RATE),
        ("7-21-0001", "YES", 12345 / RATE),
    ]
    assert utterances[1].audio == chapter / "7-21-0001.flac"
    assert utterances[1].where == f"{chapter / '7-21.trans.txt'} line 2, utterance '7-21-0001'"


AUDIO = {
    "cut in half": (lambda path: path.write_bytes(path.read_bytes()[:7000]), "cannot be decoded", "cut short"),
    "one bit changed": (
        lambda path: path.write_bytes(path.read_bytes()[:7000] + b"\x01" + path.read_bytes()[7001:]),
        "cannot be decoded",
        "damaged",
    ),
    "no audio": (lambda path: path.write_bytes(b"no audio"), "not audio", "libsndfile"),
    "no bytes": (lambda path: path.write_bytes(b""), "no samples", "0 bytes"),
    "no file": (lambda path: path.unlink(), "missing audio", "no such audio file"),
    "no length": (lambda path: declare(path, 0), "no length", "how long"),
    "false length": (lambda path: declare(path, 2**36 - 1), "cannot be decoded", "damaged or cut short"),
    "8 kHz": (
        lambda path: soundfile.write(path, np.linspace(-1, 1, 4000), 8000),
        "sample rate",
        "sampled at 8000 Hz, expected 16000 Hz",
    ),
    "stereo": (lambda path: soundfile.write(path, np.random.rand(8000, 2), RATE), "not mono", "2 channels"),
    "399 samples": (
        lambda path: soundfile.write(path, np.linspace(-1, 1, 399), RATE),
        "shorter than a window",
        "24.9 ms of audio, less than one window of 25 ms",
    ),
    "silence": (lambda path: soundfile.write(path, np.zeros(8000), RATE), "silence", "digital silence"),
}


def declare(path, samples):
    """Change the number of samples, 36 bits, in the header of a FLAC file."""
    content = bytearray(path.read_bytes())
    content[21] = content[21] & 0xF0 | samples >> 32
    content[22:26] = (samples & 0xFFFFFFFF).to_bytes(4, "big")
    path.write_bytes(content)


@pytest.mark.parametrize("case", AUDIO)
def test_bad_audio(chapter, case):
    damage, kind, words = AUDIO[case]
    _, path = write(chapter, [b"7-21-0000 YES", b"7-21-0001 NO"])
    damage(path)
    fault = only_fault(chapter)
    assert (fault.kind, fault.subject) == (kind, "7-21-0001")
    assert fault.message.startswith(f"{path}: ")
    assert words in fault.message


def test_all_faults_of_one_utterance_are_found(chapter):
    _, path = write(chapter, [b"7-21-0000 YES", b"7-21-0001 7"])
    soundfile.write(path, np.zeros((100, 2)), 8000)
    _, faults = read_speaker(chapter.parent)
    kinds = ["sample rate", "not mono", "shorter than a window", "silence", "odd characters"]
    assert [fault.kind for fault in faults] == kinds
    assert {fault.subject for fault in faults} == {"7-21-0001"}


TRANSCRIPTS = {
    "other characters": ("NA\N{LATIN CAPITAL LETTER I WITH DIAERESIS}VE 2".encode(), "odd characters", "'2', 'Ï'"),
    "lower case": (b"yes", "odd characters", "'e', 's', 'y'"),
    "a tab": (b"YES\tNO", "odd characters", r"'\t'"),
    "quotes": (b'SAY "HI"', "odd characters", "'\"'"),
    "a zero-width space": ("YES\u200bNO".encode(), "odd characters", r"'\u200b'"),
    "no words": (b" ", "empty transcript", "is empty"),
}


@pytest.mark.parametrize("case", TRANSCRIPTS)
def test_bad_transcript(chapter, case):
    text, kind, words = TRANSCRIPTS[case]
    write(chapter, [b"7-21-0000 NULL", b"7-21-0001 " + text])
    fault = only_fault(chapter)
    assert (fault.kind, fault.subject) == (kind, "7-21-0001")
    assert fault.message.startswith(f"{chapter / '7-21.trans.txt'} line 2, utterance '7-21-0001': ")
    assert words in fault.message


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"7-21-0001 CAF\xc9", "is not UTF-8 (byte 0xC9)"),
        (b"7-21-0001 YES\0NO", "holds a NUL"),
        (b"7-21-0001 YES\rNO", "holds a carriage return"),
        (b"8-21-0001 YES", "begins with '8-21-0001', expected an id such as 7-21-0000"),
        ("7-21-0001\u00a0YES".encode(), "expected an id such as"),
    ],
)
def test_a_line_that_is_no_transcript(chapter, line, words):
    write(chapter, [b"7-21-0000 YES"])
    with open(chapter / "7-21.trans.txt", "ab") as file:
        file.write(line)
    fault = only_fault(chapter)
    assert fault.kind == "not a transcript"
    assert fault.message.startswith(f"{chapter / '7-21.trans.txt'} line 2: ")
    assert words in fault.message


def test_missing_and_repeated_transcripts(chapter):
    write(chapter, [b"7-21-0000 YES", b"7-21-0001 NO", b"7-21-0001 NO", b"7-21-0002 NO"])
    (chapter / "7-21-0002.flac").rename(chapter / "7-21-0003.flac")
    utterances, faults = read_speaker(chapter.parent)
    assert [utterance.id for utterance in utterances] == ["7-21-0000"]
    found = [(fault.kind, fault.subject) for fault in faults]
    assert found == [
        ("duplicate id", "7-21-0001"),
        ("missing transcript", "7-21-0003"),
        ("missing audio", "7-21-0002"),
    ]
    (chapter / "7-21.trans.txt").unlink()
    assert [fault.kind for fault in read_speaker(chapter.parent)[1]] == ["missing transcript"] * 3


def test_line_ends_byte_order_marks_and_empty_lines_are_no_fault(chapter):
    write(chapter, [b"7-21-0000 YES", b"7-21-0001 NO"])
    (chapter / "7-21.trans.txt").write_bytes(b"\xef\xbb\xbf7-21-0000 YES\r\n\r\n7-21-0001 NO \r\n\n")
    utterances, faults = read_speaker(chapter.parent)
    assert not faults
    assert [(utterance.id, utterance.text) for utterance in utterances] == [("7-21-0000", "YES"), ("7-21-0001", "NO")]


def test_speakers_are_in_the_order_of_their_numbers(chapter):
    root = chapter.parents[2]
    for name in ("11", "1034", "9"):
        (root / "dev-clean" / name).mkdir()
    assert [folder.name for folder in speakers(root, "dev-clean")] == ["7", "9", "11", "1034"]
    with pytest.raises(InputError, match=r"dev-other: no such subset; in .*LibriSpeech there are: dev-clean"):
        speakers(root, "dev-other")


def test_checksums_are_those_of_torchaudio():
    from torchaudio.datasets.librispeech import _CHECKSUMS

    ours = {f"{subset}.tar.gz": digest for subset, digest in librispeech.CHECKSUMS.items()}
    assert ours == {address.rpartition("/")[2]: digest for address, digest in _CHECKSUMS.items()}


def test_a_subset_appears_whole_from_its_archive(chapter, tmp_path, monkeypatch):
    """The download itself is tested elsewhere."""
    write(chapter, [b"7-21-0000 YES"])
    archive = tmp_path / "elsewhere" / "dev-clean.tar.gz"
    archive.parent.mkdir()
    (chapter.parents[2] / "README.TXT").write_text("new")
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(chapter.parents[2], "LibriSpeech")
    asked = []
    monkeypatch.setattr(librispeech, "download", lambda *arguments: asked.append(arguments) or archive)
    root = tmp_path / "other" / "LibriSpeech"
    root.mkdir(parents=True)
    (root / "README.TXT").write_text("mine")
    for _ in range(2):
        download_subset(root, "dev-clean")
    digest = librispeech.CHECKSUMS["dev-clean"]
    address = "https://www.openslr.org/resources/12/dev-clean.tar.gz"
    assert asked == [(address, tmp_path / "other" / "dev-clean.tar.gz", f"sha256:{digest}")]
    assert read_speaker(root / "dev-clean" / "7")[0][0].text == "YES"
    assert (root / "README.TXT").read_text() == "mine"
    assert [path.name for path in root.parent.iterdir()] == ["LibriSpeech"]
    with pytest.raises(InputError, match="dev-dirty: not a subset that OpenSLR has"):
        download_subset(root, "dev-dirty")
