"""A million utterances and a million sentence pairs: seconds and memory of what a training does with them.

    python -m tests.stress.load --rows 1000000

Each measurement runs in a process of its own, so that its peak is its own; that of the imports alone comes first.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

WORDS = [f"{syllable}{ending}" for syllable in ("ba", "do", "ki", "lu", "me") for ending in ("n", "rt", "sk", "l")]


def sentences(rows: int, seed: int) -> Iterator[str]:
    """Reproducible text of 3 to 20 words, a thousand sentences at a time."""
    generator = np.random.default_rng(seed)
    for start in range(0, rows, 1000):
        for length in generator.integers(3, 21, min(1000, rows - start)):
            yield " ".join(WORDS[i] for i in generator.integers(0, len(WORDS), length))


def write_manifest(folder: Path, rows: int) -> None:
    """Rows that name cached features; their audio is never opened."""
    frames = np.random.default_rng(0).integers(100, 1500, rows)
    with open(folder / "train.tsv", "w", encoding="utf-8") as file:
        file.write("id\taudio\tduration\ttext\tspeaker\tfeatures\toffset\tframes\n")
        for i, text in enumerate(sentences(rows, 1)):
            file.write(f"u{i}\ta/{i}.flac\t{frames[i] / 100}\t{text}\ts{i % 99}\tf.npy\t0\t{frames[i]}\n")
    (folder / "dict.txt").write_text("".join(f"{c} 1\n" for c in "|abdeiklmnorstu"))
    np.save(folder / "f.npy", np.zeros((1500, 80), np.float16))


def imports(folder: Path, rows: int) -> str:
    import fairseq.tasks  # noqa: F401

    return "nothing but imports"


def read_rows(folder: Path, rows: int) -> str:
    from speech_mt.data.manifest import read_manifest

    manifest = read_manifest(folder / "train.tsv")
    assert len(manifest) == rows
    return f"{rows:,} rows read and checked"


def plan_and_resume(folder: Path, rows: int) -> str:
    """What happens before the first update, and the first batches after a resume at the middle of the epoch."""
    from speech_mt import compat

    compat.apply()
    from speech_mt.tasks.speech import SpeechManifestTask
    from speech_mt.tasks.speech_config import SpeechManifestConfig

    cfg = SpeechManifestConfig(data=str(folder), max_source_positions=6000, max_target_positions=1024, seed=1)
    cfg.train_subset, cfg.post_process = "train", None
    task = SpeechManifestTask.setup_task(cfg)
    task.load_dataset("train")

    def iterator() -> object:
        return task.get_batch_iterator(
            task.dataset("train"), max_tokens=20000, max_positions=(6000, 1024), ignore_invalid_inputs=True, seed=1
        )

    batches = iterator()
    begin = time.monotonic()
    middle = len(batches) // 2
    batches.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": middle, "shuffle": True})
    resumed = batches.next_epoch_itr()
    ids = [len(next(resumed)["id"]) for _ in range(3)]
    assert all(ids)
    return f"{len(batches):,} batches planned; {time.monotonic() - begin:.1f} s of it to resume after batch {middle:,}"


def iterate_ids(folder: Path, rows: int) -> str:
    """Every sample's features and target made once, without a model."""
    from speech_mt.data.features import FeatureConfig
    from speech_mt.data.manifest import read_manifest
    from speech_mt.data.speech_dataset import SpeechDataset
    from speech_mt.data.transcripts import CharacterTokenizer

    indices = {symbol: i for i, symbol in enumerate(["<s>", "<pad>", "</s>", "<unk>", *"|abdeiklmnorstu"])}
    manifest = read_manifest(folder / "train.tsv")
    dataset = SpeechDataset(manifest, FeatureConfig(), CharacterTokenizer(indices), pad=1, eos=2, training=True)
    some = range(0, rows, max(1, rows // 20000))
    for i in some:
        dataset[i]
    return f"{len(some):,} utterances spread over the manifest made into samples"


def check_text(folder: Path, rows: int) -> str:
    from speech_mt.data.text import check_parallel

    clean = folder / "clean.de", folder / "clean.en"
    report = check_parallel(folder / "train.de", folder / "train.en", drop=True, write_to=clean)
    return f"{report.kept:,} of {rows:,} pairs kept"


def batch_text(folder: Path, rows: int) -> str:
    """fairseq's batches of a million pairs, and a resume in the middle."""
    from speech_mt import compat

    compat.apply()
    from fairseq.data import Dictionary, LanguagePairDataset, iterators
    from fairseq.data.data_utils import batch_by_size, numpy_seed

    sizes = np.random.default_rng(0).integers(4, 22, rows)
    dictionary = Dictionary()
    source = Sized(sizes)
    dataset = LanguagePairDataset(source, sizes, dictionary, source, sizes, dictionary)
    with numpy_seed(2):
        order = LanguagePairDataset.ordered_indices(dataset)
    batches = batch_by_size(order, None, num_tokens_vec=sizes, max_tokens=4096)
    begin = time.monotonic()
    itr = iterators.EpochBatchIterator(dataset, collate_fn=len, batch_sampler=batches, seed=1)
    itr.load_state_dict({"version": 2, "epoch": 3, "iterations_in_epoch": len(batches) // 2, "shuffle": True})
    assert itr.iterations_in_epoch == len(batches) // 2
    return f"{len(batches):,} batches; {time.monotonic() - begin:.1f} s of it to resume after half of them"


class Sized:
    """As much of a dataset of token ids as batching looks at."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)


STEPS: tuple[Callable[[Path, int], str], ...] = (
    imports,
    read_rows,
    plan_and_resume,
    iterate_ids,
    check_text,
    batch_text,
)


def measure(step: Callable[[Path, int], str], folder: Path, rows: int) -> tuple[str, float, float]:
    """What a step says, its seconds, and the peak memory of its process in MB."""
    begin = time.monotonic()
    said = step(folder, rows)
    return said, time.monotonic() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_manifest(folder, args.rows)
        for language, seed in (("de", 1), ("en", 2)):
            with open(folder / f"train.{language}", "w", encoding="utf-8") as file:
                file.writelines(line + "\n" for line in sentences(args.rows, seed))
        size = {path.name: path.stat().st_size / 2**20 for path in folder.glob("train.*")}
        print(
            "files: " + ", ".join(f"{path} {megabytes:.0f} MB" for path, megabytes in sorted(size.items())), flush=True
        )
        for step in STEPS:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                said, seconds, peak = pool.apply(measure, (step, folder, args.rows))
            print(f"{step.__name__:16} {seconds:6.1f} s  {peak:6.0f} MB  {said}", flush=True)


if __name__ == "__main__":
    main()
