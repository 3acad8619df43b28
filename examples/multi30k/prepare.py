"""Multi30k task 1: get the raw text, check it, learn joint pieces on the training text, binarise.

    OUT/text/{train,valid,test,test1,test2}.{en,de,fr}  the captions as published
    OUT/bin                                          for fairseq-train; test is test_2016_flickr, test1
                                                     test_2017_flickr and test2 test_2017_mscoco

The files come from the folder multi30k of $SPEECH_MT_DATA if that is set, else from the dataset's own repository;
either way their SHA-256 is checked. An interrupted run goes on where it was. Source: Elliott et al. 2016, arXiv
1605.00459.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import shutil
from pathlib import Path

from speech_mt.data.download import download
from speech_mt.data.parallel_corpus import ParallelCorpus, Vocabulary, prepare_parallel_corpus
from speech_mt.data.stage import atomic_path, run_stage
from speech_mt.errors import InputError, run

URL = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw"
SPLITS = {
    "train": "train",
    "valid": "val",
    "test": "test_2016_flickr",
    "test1": "test_2017_flickr",
    "test2": "test_2017_mscoco",
}
SHA256 = {
    "test_2016_flickr.de": "9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8",
    "test_2016_flickr.en": "611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9",
    "test_2016_flickr.fr": "6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90",
    "test_2017_flickr.de": "a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee",
    "test_2017_flickr.en": "76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074",
    "test_2017_flickr.fr": "3ba671ceb2299f3304ffafefea7a833d08632fbaf0ba18546f8a2ec2391af496",
    "test_2017_mscoco.de": "799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338",
    "test_2017_mscoco.en": "aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58",
    "test_2017_mscoco.fr": "754f3072ba9f124569ba5258b32730fc1d214bbf8e0c6dfb2b74401676220db0",
    "train.de": "726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6",
    "train.en": "d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f",
    "train.fr": "622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c",
    "val.de": "f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a",
    "val.en": "14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28",
    "val.fr": "ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9",
}
PIECES = 6000


def archive(name: str, folder: Path) -> Path:
    """The compressed text ``name``: a local one, else a download into ``folder``.

    Raises:
        InputError: it is not the published file.
    """
    file = f"{name}.gz"
    local = Path(os.environ.get("SPEECH_MT_DATA", "/nowhere")) / "multi30k" / file
    if not local.exists():
        return download(f"{URL}/{file}", folder / file, f"sha256:{SHA256[name]}")
    found = hashlib.sha256(local.read_bytes()).hexdigest()
    if found != SHA256[name]:
        raise InputError(f"{local} is not Multi30k's: its SHA-256 is {found}, not {SHA256[name]}; take it away")
    return local


def unpack_text(out: Path, languages: tuple[str, str]) -> str:
    """Write ``OUT/text/<split>.<language>``; return a line about it."""
    for split, name in SPLITS.items():
        for language in languages:
            packed = archive(f"{name}.{language}", out / "download")
            with (
                gzip.open(packed) as text,
                atomic_path(out / "text" / f"{split}.{language}") as temporary,
                open(temporary, "wb") as file,
            ):
                shutil.copyfileobj(text, file)
    return f"{' and '.join(languages)} of {', '.join(SPLITS.values())}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, type=Path, help="folder to make")
    parser.add_argument("--source-lang", choices=("en", "de", "fr"), default="en")
    parser.add_argument("--target-lang", choices=("en", "de", "fr"), default="de")
    args = parser.parse_args()
    languages = args.source_lang, args.target_lang
    if args.source_lang == args.target_lang:
        raise InputError(f"--source-lang and --target-lang are both {args.source_lang}")
    corpus = ParallelCorpus(*languages, {split: str(args.out / "text" / split) for split in SPLITS})
    settings = {"languages": languages}
    run_stage(args.out, "text", settings, lambda: unpack_text(args.out, languages), outputs=corpus.files())
    prepare_parallel_corpus(corpus, args.out, Vocabulary(PIECES), workers=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    run(main)
