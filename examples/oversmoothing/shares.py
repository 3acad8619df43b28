"""A share of a training set, chosen by a seed; validation, test set and dictionary are those of the whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np

from speech_mt.data.manifest import Manifest, read_manifest, write_manifest
from speech_mt.data.stage import run_stage
from speech_mt.errors import InputError


def chosen(count: int, share: float, seed: int) -> list[int]:
    """Which of ``count`` to keep, at least one, in order.

    Raises:
        InputError: no share.
    """
    if not 0 < share <= 1:
        raise InputError(f"a share of {share:g} of the training set: give one above 0, at most 1")
    kept = np.random.default_rng(seed).permutation(count)[: max(1, round(share * count))]
    return sorted(kept.tolist())


def part_of_manifest(whole: Path, folder: Path, share: float, seed: int) -> Path:
    """``folder`` with a shorter train.tsv than ``whole``."""

    def write() -> str:
        counts = []
        for split in ("train", "test"):
            manifest = read_manifest(whole / f"{split}.tsv")
            kept = chosen(len(manifest), share if split == "train" else 1.0, seed)
            write_manifest(folder / f"{split}.tsv", [_anywhere(manifest, row) for row in kept])
            counts.append(f"{len(kept)} of {len(manifest)} {split} utterances")
        _link(whole / "dict.txt", folder / "dict.txt")
        return ", ".join(counts)

    run_stage(folder, "share", {"whole": str(whole), "share": share, "seed": seed}, write)
    return folder


def _anywhere(manifest: Manifest, row: int) -> dict[str, str]:
    """A row with absolute paths."""
    fields = manifest.row(row) | {"audio": str(manifest.audio_path(row).absolute())}
    if "features" in fields:
        fields["features"] = str((manifest.path.parent / fields["features"]).absolute())
    return fields


def part_of_pairs(whole: Path, folder: Path, share: float, seed: int) -> Path:
    """``folder/bin`` with fewer training pairs than the binarised ``whole``, beside what its test set is made from."""

    def write() -> str:
        from fairseq.data import data_utils, indexed_dataset
        from fairseq.data.dictionary import Dictionary

        (folder / "bin").mkdir(parents=True, exist_ok=True)
        count = 0
        for path in whole.iterdir():
            if path.name.startswith("train."):
                if path.suffix != ".bin":
                    continue
                prefix = str(path.with_suffix(""))
                dictionary = Dictionary.load(str(whole / f"dict.{path.stem.rpartition('.')[2]}.txt"))
                sentences = data_utils.load_indexed_dataset(prefix, dictionary)
                count = len(sentences)
                target = folder / "bin" / path.name
                builder = indexed_dataset.make_builder(str(target), "mmap", len(dictionary))
                for i in chosen(count, share, seed):
                    builder.add_item(sentences[i].long())
                builder.finalize(str(target.with_suffix(".idx")))
            else:
                shutil.copyfile(path, folder / "bin" / path.name)
        for name in ("spm.model", "raw"):
            _link(whole.parent / name, folder / name)
        return f"{len(chosen(count, share, seed))} of {count} pairs"

    run_stage(folder, "share", {"whole": str(whole), "share": share, "seed": seed}, write)
    return folder / "bin"


def _link(source: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(source.resolve(), path.parent.resolve()))
