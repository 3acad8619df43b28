"""Damaged files of every kind that is read: each has to be taken, or refused in one message that names it.

    python -m tests.stress.fuzz_files --seconds 300 --seed 1

A file starts sound and is then cut, overwritten, spliced with itself or with bytes that break parsers. Anything but a
result or an :class:`InputError` that names the file (or an ``OSError``, which does) is a fault.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import soundfile
import torch

from speech_mt.checkpoint import load_checkpoint, save_checkpoint
from speech_mt.checkpoint.folding import fold_checkpoint
from speech_mt.checkpoint.mismatch import explain_mismatch
from speech_mt.data.audio import audio_duration, read_audio
from speech_mt.data.feature_cache import cached_log_mel
from speech_mt.data.manifest import read_manifest, write_manifest
from speech_mt.data.text import check_parallel
from speech_mt.data.vocabulary import load_sentencepiece, train_sentencepiece
from speech_mt.errors import InputError
from speech_mt.scoring.hypotheses import read_parallel

NASTY = [
    b"\0",
    b"\r",
    b"\t",
    b"\n",
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xdf",
    b"nan",
    b"-1",
    b"1e999",
    b"\xf0\x9f\x98\x80",
]
NASTY += ["\u2028".encode(), "\u0085".encode(), b"\\t", b'"', b"9" * 400, b"null", b"{", b"<unk>", b" " * 9]


def damage(content: bytes, draw: random.Random) -> bytes:
    """One to four changes."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(5)
        if kind == 0:
            del changed[at:]
        elif kind == 1:
            changed[at:at] = draw.choice(NASTY)
        elif kind == 2:
            changed[at : at + draw.randint(1, 8)] = draw.randbytes(draw.randint(1, 8))
        elif kind == 3:
            changed[at:at] = changed[draw.randrange(len(changed) + 1) :][: draw.randint(1, 60)]
        else:
            del changed[at : at + draw.randint(1, 60)]
    return bytes(changed)


# -- what is read, name -> (write a sound file in a folder and return its path, read it) ------------------------------


def _manifest(folder: Path) -> Path:
    rows = [
        {"id": f"u{i}", "audio": f"{i}.wav", "duration": 1.5 + i, "text": 'say "hi", null', "speaker": "ä"}
        for i in range(4)
    ]
    write_manifest(folder / "train.tsv", rows)
    return folder / "train.tsv"


def _read_manifest(path: Path) -> None:
    manifest = read_manifest(path)
    copy = path.with_name("copy.tsv")
    write_manifest(copy, [manifest.row(i) for i in range(len(manifest))])
    again = read_manifest(copy)
    assert [again.row(i) for i in range(len(again))] == [manifest.row(i) for i in range(len(manifest))]
    assert np.isfinite(manifest.duration).all()


def _text(folder: Path) -> Path:
    (folder / "train.en").write_text("one two\nthree\nfour five\n" * 4, encoding="utf-8")
    (folder / "train.de").write_text("eins zwei\ndrei\nvier fünf\n" * 4, encoding="utf-8")
    return folder / "train.de"


def _read_text(path: Path) -> None:
    clean = path.with_name("clean.de"), path.with_name("clean.en")
    report = check_parallel(path, path.with_name("train.en"), drop=True, write_to=clean)
    lines = [side.read_text(encoding="utf-8").split("\n") for side in clean]
    assert len(lines[0]) == len(lines[1]) == report.kept + 1


def _generated(folder: Path) -> Path:
    lines = []
    for i in (2, 0, 1):
        lines += [f"S-{i}\ta b", f"T-{i}\tx y {i}", f"H-{i}\t-0.5\tx {i}", f"D-{i}\t-0.5\tx {i}", f"P-{i}\t-0.1 -0.2"]
    (folder / "generate-test.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "generate-test.txt"


def _read_generated(path: Path) -> None:
    pairs = read_parallel(path, [])
    assert len(pairs.hypotheses) == len(pairs.references[0]) == len(pairs.ids)


def _audio(extension: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / f"a.{extension}"
        soundfile.write(path, 0.3 * np.sin(np.arange(4000) / 9), 16000)
        return path

    return write


def _read_audio(path: Path) -> None:
    audio_duration(path)
    assert np.isfinite(read_audio(path, 16000, resample=True)).all()


def _features(folder: Path) -> Path:
    np.save(folder / "f.npy", np.ones((20, 8), np.float32))
    row = {"id": "u", "audio": "a.wav", "duration": 0.2, "text": "x", "speaker": "s"}
    write_manifest(folder / "cached.tsv", [row | {"features": "f.npy", "offset": 0, "frames": 20}])
    return folder / "f.npy"


def _read_features(path: Path) -> None:
    from speech_mt.data import feature_cache

    feature_cache._map_shard.cache_clear()
    assert cached_log_mel(read_manifest(path.with_name("cached.tsv")), 0, 8, 16000).shape == (20, 8)


def _checkpoint(folder: Path) -> Path:
    golden = Path(__file__).parents[1] / "golden" / "sigma_deepnorm.pt"
    save_checkpoint(load_checkpoint(golden), folder / "checkpoint.pt")
    return folder / "checkpoint.pt"


def _read_checkpoint(path: Path) -> None:
    load_checkpoint(path)


def _other_checkpoint(folder: Path) -> Path:
    """A file that is not damaged but of another model: the bytes choose which of its names and shapes go."""
    (folder / "choice").write_bytes(bytes(range(64)))
    return folder / "choice"


def _read_other_checkpoint(path: Path) -> None:
    golden = load_checkpoint(Path(__file__).parents[1] / "golden" / "sigma_deepnorm.pt")
    draw = random.Random(path.read_bytes())
    weights = dict(golden["model"])
    for name in draw.sample(sorted(weights), draw.randint(1, 9)):
        kind = draw.randrange(4)
        if kind == 0:
            del weights[name]
        elif kind == 1:
            weights[name] = torch.zeros(3, 5)
        elif kind == 2:
            weights[name.replace("layers.1", "layers.7")] = weights.pop(name)
        else:
            weights[name + "x"] = weights[name]
    assert explain_mismatch(golden["model"], weights).startswith("the checkpoint does not fit the model: ")
    model_cfg = dict(golden["cfg"]["model"])
    for name in draw.sample(sorted(model_cfg), 3):
        model_cfg[name] = draw.choice([None, "x", -1, 0.5])
    try:
        fold_checkpoint(golden | {"model": weights, "cfg": {**golden["cfg"], "model": model_cfg}})
    except InputError as error:
        raise InputError(f"choice: {error}") from None


def _sentencepiece(folder: Path) -> Path:
    train_sentencepiece([f"one two three four {i}" for i in range(200)], folder / "spm.model", vocab_size=40)
    return folder / "spm.model"


def _read_sentencepiece(path: Path) -> None:
    load_sentencepiece(path)


KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], None]]] = {
    "manifest": (_manifest, _read_manifest),
    "parallel text": (_text, _read_text),
    "fairseq-generate output": (_generated, _read_generated),
    "WAV": (_audio("wav"), _read_audio),
    "FLAC": (_audio("flac"), _read_audio),
    "OGG": (_audio("ogg"), _read_audio),
    "cached features": (_features, _read_features),
    "checkpoint": (_checkpoint, _read_checkpoint),
    "checkpoint of another model": (_other_checkpoint, _read_other_checkpoint),
    "sentencepiece model": (_sentencepiece, _read_sentencepiece),
}


def fuzz(kind: str, cases: int, seconds: float, draw: random.Random) -> tuple[collections.Counter[str], list[str]]:
    """How many files were taken and refused, and each fault."""
    write, read = KINDS[kind]
    counts: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name:
        path = write(Path(name))
        sound = path.read_bytes()
        if read is not _read_other_checkpoint:
            read(path)
        while counts.total() < cases and time.monotonic() < end:
            content = damage(sound, draw)
            path.unlink()  # not in place: what is mapped into memory must not change under it
            path.write_bytes(content)
            try:
                read(path)
                counts["taken"] += 1
            except InputError as error:
                named = path.name in str(error) or "cached.tsv" in str(error) or "copy.tsv" in str(error)
                counts["refused" if named and "\n" not in str(error) else "refused without its name"] += 1
                if not named or "\n" in str(error):
                    faults.append(f"{kind}: {error}")
            except Exception:
                counts["fault"] += 1
                faults.append(f"{kind}: {traceback.format_exc()}")
    return counts, faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    all_faults = []
    errors = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # libraries in C++ tell what they think of such files
    for kind in KINDS:
        counts, faults = fuzz(kind, 10**9, args.seconds / len(KINDS), random.Random(args.seed))
        all_faults += faults
        print(f"{kind:30} {counts.total():8,} files: " + ", ".join(f"{n:,} {what}" for what, n in counts.items()))
    os.dup2(errors, 2)
    for fault in all_faults[:10]:
        print(fault)
    print(f"faults: {len(all_faults)}")
    raise SystemExit(bool(all_faults))


if __name__ == "__main__":
    main()
