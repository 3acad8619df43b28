"""WMT'17 English-German: get the corpora, check them, learn joint pieces on the training text, binarise.

    prepare.py --out runs/wmt_en_de/data                                  downloads 1.7 GB
    prepare.py --out DIR --corpus mine=corpora/mine --valid dev --test newstest2021=wmt/newstest2021
    prepare.py --out DIR --test wmt14/full --test wmt20                   test sets by their names in sacrebleu

    OUT/text/{train,valid,test,test1,...}.{en,de}  the text as it came
    OUT/moses/...                                  tokenised, with --moses
    OUT/raw/..., OUT/report.raw.json               checked, and every count of the check
    OUT/spm.model, OUT/dict.txt, OUT/bin           joint pieces, and data for fairseq-train

An interrupted run, or download, goes on where it was. Local files are PREFIX.en and PREFIX.de, a sentence a line.
Dev is newstest2013 and test newstest2014 (all 3,003 sentences) unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from speech_mt.arguments import integer, non_negative_int, number, positive_int
from speech_mt.data.corpora import concatenate, write_test_set
from speech_mt.data.download import download, unpack
from speech_mt.data.moses import tokenize_file
from speech_mt.data.parallel_corpus import (
    LengthLimits,
    ParallelCorpus,
    Vocabulary,
    digest,
    prepare_parallel_corpus,
)
from speech_mt.data.stage import run_stage
from speech_mt.data.vocabulary import MIN_PIECES
from speech_mt.errors import InputError, run

# name: address, SHA-256, the two files inside without their language
CORPORA = {
    "europarl_v7": (
        "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
        "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
        "training/europarl-v7.de-en",
    ),
    "commoncrawl": (
        "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
        "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
        "commoncrawl.de-en",
    ),
    "news_commentary_v12": (
        "https://data.statmt.org/wmt17/translation-task/training-parallel-nc-v12.tgz",
        "2b45f30ef1d550d302fd17dd3a5cbe19134ccc4c2cf50c2dae534aee600101a2",
        "training/news-commentary-v12.de-en",
    ),
}
DEV, TEST = "wmt13", "wmt14/full"


def corpus_files(name: str, folder: Path) -> str:
    """Download and unpack a corpus of :data:`CORPORA`; the prefix of its two files."""
    url, sha256, files = CORPORA[name]
    archive = download(url, folder / url.rpartition("/")[2], f"sha256:{sha256}")
    return str(unpack(archive, folder / name) / files)


def is_local(name: str, languages: tuple[str, str]) -> bool:
    """Whether ``name`` is a prefix of local files, not a test set of sacrebleu.

    Raises:
        InputError: only one of the two files is there.
    """
    there = [Path(f"{name}.{language}").exists() for language in languages]
    if any(there) and not all(there):
        raise InputError(f"{name}.{languages[there.index(False)]}: no such file, but there is its other side")
    return all(there)


def gather(args: argparse.Namespace, languages: tuple[str, str], splits: dict[str, str]) -> str:
    """Write ``OUT/text``; return a line about it."""
    text = args.out / "text"
    prefixes = dict(corpus.partition("=")[::2] for corpus in args.corpus)
    if not prefixes:
        prefixes = {name: corpus_files(name, args.out / "download") for name in CORPORA}
    files = {name: [Path(f"{prefix}.{side}") for side in languages] for name, prefix in prefixes.items()}
    lines = concatenate(files, [text / f"train.{side}" for side in languages])
    for split, name in splits.items():
        if is_local(name, languages):
            concatenate(
                {name: [Path(f"{name}.{side}") for side in languages]},
                [text / f"{split}.{side}" for side in languages],
            )
        else:
            print(f"  {split}: {write_test_set(name, languages, text / split)}", flush=True)
    return ", ".join(f"{count:,} lines of {name}" for name, count in lines.items())


def summary(out: Path) -> str:
    """What there is, from the reports."""
    raw = json.loads((out / "report.raw.json").read_text())
    encoded = json.loads((out / "report.encoded.json").read_text())
    lines = [f"{'':24}{'lines':>12}{'pieces':>15}{'a line':>9}{'<unk>':>9}"]
    for name, side in encoded.items():
        lines.append(f"{name:24}{side['lines']:12,}{side['pieces']:15,}{side['mean']:9.2f}{side['unknown']:9,}")
    for split, found in raw["also_in_train"].items():
        lines.append(f"{split}: {found['sources']:,} sources, {found['pairs']:,} pairs are also in train")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--source-lang", default="en")
    parser.add_argument("--target-lang", default="de")
    parser.add_argument(
        "--corpus", action="append", default=[], metavar="NAME=PREFIX", help="local training text, instead of WMT's"
    )
    parser.add_argument("--valid", default=DEV, metavar="SET", help="a prefix of local files or a set of sacrebleu")
    parser.add_argument("--test", action="append", default=[], metavar="SET", help="likewise; may be repeated")
    parser.add_argument("--moses", action="store_true", help="tokenise with Moses' rules (default: raw text)")
    parser.add_argument("--vocab-size", type=integer(MIN_PIECES), default=32_000)
    parser.add_argument("--model-type", choices=("bpe", "unigram"), default="unigram")
    parser.add_argument("--no-byte-fallback", action="store_true", help="leave rare characters to <unk>, and count it")
    parser.add_argument("--max-lines", type=non_negative_int, default=2_000_000, help="to learn pieces from; 0: all")
    parser.add_argument("--max-length", type=positive_int, default=1000, help="in characters, train only")
    parser.add_argument("--max-length-ratio", type=number(1), default=3.0, help="longer over shorter side, train only")
    parser.add_argument("--workers", type=positive_int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    languages = args.source_lang, args.target_lang
    if bad := [corpus for corpus in args.corpus if "=" not in corpus]:
        raise InputError(f"--corpus {bad[0]}: NAME=PREFIX, such as news=corpora/news")
    splits = {"valid": args.valid}
    splits |= {f"test{i or ''}": name for i, name in enumerate(args.test or [TEST])}

    settings = {"languages": languages, "corpora": args.corpus or list(CORPORA), **splits}
    local = [corpus.partition("=")[2] for corpus in args.corpus]
    local += [name for name in splits.values() if is_local(name, languages)]
    settings |= {f"{name}.{side}": digest(Path(f"{name}.{side}")) for name in local for side in languages}
    text = ParallelCorpus(*languages, {split: str(args.out / "text" / split) for split in ("train", *splits)})
    run_stage(args.out, "text", settings, lambda: gather(args, languages, splits), outputs=text.files())
    if args.moses:
        tokenized = text.inside(args.out / "moses")

        def tokenize() -> str:
            return ", ".join(
                tokenize_file(path, output, side, args.workers)
                for split in text.prefixes
                for path, output, side in zip(text.sides(split), tokenized.sides(split), languages, strict=True)
            )

        run_stage(args.out, "moses", settings, tokenize, outputs=tokenized.files())
        text = tokenized
    prepare_parallel_corpus(
        text,
        args.out,
        Vocabulary(args.vocab_size, args.model_type, 0.9995, not args.no_byte_fallback, args.max_lines),
        LengthLimits(args.max_length, args.max_length_ratio),
        args.workers,
    )
    print(summary(args.out))


if __name__ == "__main__":
    run(main)
