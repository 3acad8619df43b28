"""Log-mel filterbanks computed once and kept in ``.npy`` files that data loaders map into memory.

The utterances of a manifest are cut into shards of consecutive rows. A shard is one array of shape (frames of
all its utterances, bins); the manifest gains the columns ``features`` (the shard's file), ``offset`` and
``frames``. What is kept is neither normalised nor masked, so one cache serves every normalisation and
SpecAugment policy.

Nothing is pickled. Each shard appears whole or not at all, in a folder named after all that decides its
content but the audio itself, so an interrupted extraction goes on where it was. If audio files change in
place, delete the folder. Of the audio and the features, a process holds one utterance at a time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from speech_mt.data.features import FeatureConfig, frame_count, utterance_log_mel
from speech_mt.data.manifest import Manifest, read_manifest, write_manifest
from speech_mt.data.parallel_map import parallel_map
from speech_mt.data.stage import atomic_path
from speech_mt.errors import InputError

CACHE_COLUMNS = ("features", "offset", "frames")
_UTTERANCES_PER_SHARD = 512  # about 100 MB of float16 for utterances of 12 s
_MAPPED_SHARDS = 128  # each holds a file descriptor
_ERRORS_SHOWN = 20
_SAMPLE_RATE = re.compile(r"-(\d+)Hz-")  # in the name of a folder of shards

_manifest: Manifest  # of a worker process


def has_cache(manifest: Manifest) -> bool:
    """Whether the manifest points into cached features."""
    return set(CACHE_COLUMNS) <= set(manifest.columns)


def cached_log_mel(manifest: Manifest, row: int, num_mel_bins: int, sample_rate: int) -> Tensor:
    """One row's cached filterbanks, float32 of shape (frames, num_mel_bins).

    Raises:
        InputError: naming the utterance, if the file is missing, holds no such array, has another number of
            bins or comes from another sample rate, or ends before the utterance does.
    """
    path = manifest.path.parent / manifest.field(row, "features")
    made_at = _SAMPLE_RATE.search(path.parent.name)
    if made_at is not None and int(made_at[1]) != sample_rate:
        raise InputError(
            f"{manifest.where(row)}: {path} was made from audio at {made_at[1]} Hz, --sample-rate is {sample_rate}; "
            f"run scripts/extract_features.py --sample-rate {sample_rate} again, or set --sample-rate {made_at[1]}"
        )
    try:
        start, frames = (int(manifest.field(row, column)) for column in ("offset", "frames"))
        shard = _map_shard(path)
        rows, bins = shard.shape
    except Exception as error:  # damaged bytes raise anything
        what = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{manifest.where(row)}: {path} holds no cached features ({what}); "
            "run scripts/extract_features.py again"
        ) from None
    if bins != num_mel_bins or start + frames > rows:
        raise InputError(
            f"{manifest.where(row)}: expected frames {start} to {start + frames} of {num_mel_bins} mel bins "
            f"in {path}, which has {rows} frames of {bins}; run scripts/extract_features.py again, or set "
            f"--num-mel-bins {bins}"
        )
    return torch.from_numpy(shard[start : start + frames].astype(np.float32))


def extract_features(
    manifest_path: str | Path,
    folder: str | Path | None = None,
    config: FeatureConfig | None = None,
    dtype: str = "float16",
    workers: int = 1,
) -> Path:
    """Cache the features of every utterance, then add the cache's columns to the manifest, atomically.

    Shards that are already there are not computed again. An utterance that by the manifest's duration is
    shorter than one window gets 0 frames.

    Args:
        manifest_path: the manifest, rewritten in place; all other columns stay as they are.
        folder: where the folder of shards is made; default ``features`` beside the manifest.
        config: see :class:`FeatureConfig`; its normalisation plays no part.
        dtype: ``float16`` (half the space, precise to 0.01) or ``float32``.
        workers: processes.

    Returns:
        The folder of shards.

    Raises:
        InputError: naming the utterances whose audio cannot be used; the shards without any are kept, and the
            manifest is left as it was.
    """
    manifest = read_manifest(manifest_path)
    config = config or FeatureConfig()
    folder = Path(folder) if folder is not None else manifest.path.parent / "features"
    folder = folder / f"{manifest.path.stem}-{config.sample_rate}Hz-{_fingerprint(manifest, config, dtype)}"
    starts = range(0, len(manifest), _UTTERANCES_PER_SHARD)
    shards = {start: folder / f"shard-{start // _UTTERANCES_PER_SHARD:05d}.npy" for start in starts}
    missing = {start: path for start, path in shards.items() if not path.exists()}
    if missing:
        _write_shards(manifest, missing, config, dtype, workers)
    _point_into_cache(manifest, list(shards.values()))
    return folder


def _fingerprint(manifest: Manifest, config: FeatureConfig, dtype: str) -> str:
    """Changes with the utterances, their audio paths and durations, and all that decides the features."""
    settings = (config.sample_rate, config.resample, config.num_mel_bins, dtype)
    columns = [manifest.column(column) for column in ("id", "audio", "duration")]
    return hashlib.sha256(repr((settings, columns)).encode()).hexdigest()[:12]


def _write_shards(
    manifest: Manifest, missing: dict[int, Path], config: FeatureConfig, dtype: str, workers: int
) -> None:
    errors: list[str] = []
    jobs = ((start, path, config, dtype) for start, path in missing.items())
    with tqdm(total=len(manifest), unit=" utterances", desc=str(manifest.path)) as progress:
        progress.update(len(manifest) - sum(len(_rows(manifest, start)) for start in missing))
        for utterances, found in parallel_map(_write_shard, jobs, workers, _start_worker, (manifest,)):
            progress.update(utterances)
            errors += found
    if errors:
        shown = "; ".join(errors[:_ERRORS_SHOWN])
        raise InputError(
            f"{manifest.path}: {len(errors)} utterances cannot be used; mend or remove them and run this "
            f"again, the rest is kept: {shown}{' ...' if len(errors) > _ERRORS_SHOWN else ''}"
        )


def _start_worker(manifest: Manifest) -> None:
    global _manifest
    _manifest = manifest
    torch.set_num_threads(1)  # one process a core


def _write_shard(job: tuple[int, Path, FeatureConfig, str]) -> tuple[int, list[str]]:
    """Write a shard unless an utterance of it fails; return the number of its utterances and the errors.

    Each utterance goes to the file as it comes: memory holds one.
    """
    start, path, config, dtype = job
    rows = _rows(_manifest, start)
    errors: list[str] = []
    counts: list[int] = []
    try:
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            _write_header(file, 0, config.num_mel_bins, dtype)
            for row in rows:
                try:
                    features = _utterance(row, config).numpy().astype(dtype)
                except InputError as error:
                    errors.append(str(error))
                else:
                    file.write(features.data)
                    counts.append(len(features))
            if errors:
                raise InputError("no shard without all of its utterances")
            _write_header(file, sum(counts), config.num_mel_bins, dtype)
            _save(
                _counts_path(path), np.array(counts)
            )  # first: wherever there are features, there are counts
    except InputError:
        pass  # the errors say why
    return len(rows), errors


def _write_header(file: BinaryIO, frames: int, bins: int, dtype: str) -> None:
    """The head of a ``.npy`` file: NumPy leaves room in it for the first axis to grow."""
    file.seek(0)
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": (frames, bins)}
    np.lib.format.write_array_header_1_0(file, header)


def _utterance(row: int, config: FeatureConfig) -> Tensor:
    if frame_count(round(_manifest.duration[row] * config.sample_rate), config.sample_rate) == 0:
        return torch.zeros(0, config.num_mel_bins)
    return utterance_log_mel(_manifest, row, config)


def _rows(manifest: Manifest, start: int) -> range:
    return range(start, min(start + _UTTERANCES_PER_SHARD, len(manifest)))


def _save(path: Path, array: np.ndarray) -> None:
    with atomic_path(path) as temporary, open(temporary, "wb") as file:
        np.save(file, array, allow_pickle=False)


def _counts_path(shard: Path) -> Path:
    return shard.with_suffix(".frames.npy")


def _point_into_cache(manifest: Manifest, shards: list[Path]) -> None:
    pointers = list(_pointers(manifest.path.parent, shards))
    rows = ({**manifest.row(row), **pointers[row]} for row in range(len(manifest)))
    write_manifest(manifest.path, rows)


def _pointers(manifest_folder: Path, shards: list[Path]) -> Iterator[dict[str, object]]:
    for shard in shards:
        counts = np.load(_counts_path(shard), allow_pickle=False)
        inside = shard.is_relative_to(manifest_folder)  # then data and cache can move together
        name = shard.relative_to(manifest_folder) if inside else shard.absolute()
        for offset, frames in zip(np.cumsum(counts) - counts, counts, strict=True):
            yield dict(zip(CACHE_COLUMNS, (name, offset, frames), strict=True))


@lru_cache(maxsize=_MAPPED_SHARDS)
def _map_shard(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)
