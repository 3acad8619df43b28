"""Transcribe audio files of any format, sample rate and length.

    python scripts/transcribe.py runs/speech/model/checkpoint_best.pt talk.flac interview.wav
    python scripts/transcribe.py checkpoint_best.pt *.wav --format tsv --word-timestamps > words.tsv

A line a file, as soon as it is done; what was done to its audio, and why a file could not be transcribed, goes to
stderr. The exit code is 1 if there was such a file.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import speech_mt
from speech_mt.arguments import number, positive_int
from speech_mt.errors import InputError, run

if TYPE_CHECKING:
    from speech_mt.inference.transcriber import Transcript


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="a model of the task speech_manifest")
    parser.add_argument("audio", nargs="+", help="files")
    parser.add_argument("--device", help="such as cpu or cuda:1; default: a GPU if there is one")
    parser.add_argument(
        "--data", help="the folder with dict.txt; default: where the checkpoint says, or beside it"
    )
    parser.add_argument("--batch-size", type=positive_int, default=8, help="chunks of audio at once")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--format",
        choices=("text", "tsv", "jsonl"),
        default="text",
        help="text: an empty line for a file that failed; tsv: a manifest that score_wer.py reads (id: the file's name "
        "without its suffix); jsonl: an object a line",
    )
    output.add_argument("--word-timestamps", action="store_true", help="seconds of each word, with tsv and jsonl (CTC)")
    length = parser.add_argument_group("long audio")
    length.add_argument("--chunk-seconds", type=number(0.01), default=30.0, help="longer audio is cut into chunks")
    length.add_argument("--overlap-seconds", type=number(0), default=4.0, help="that neighbouring chunks share")
    search = parser.add_argument_group("search")
    search.add_argument("--beam", type=positive_int, default=5, help="models with a decoder")
    search.add_argument("--ctc-beam", type=int, help="CTC models: prefix beam search; default: best path")
    search.add_argument("--ctc-lm", help="word n-gram (ARPA or KenLM), for --ctc-beam")
    search.add_argument("--ctc-lm-weight", type=float)
    search.add_argument("--ctc-word-bonus", type=float)
    search.add_argument("--ctc-rescore-weight", type=float, help="models with a decoder and a CTC head")
    args = parser.parse_args()
    if args.word_timestamps and args.format == "text":
        parser.error("--word-timestamps has no place in plain text: add --format tsv or --format jsonl")
    return args


def main() -> int:
    args = parse_args()
    search = ("ctc_beam", "ctc_lm", "ctc_lm_weight", "ctc_word_bonus", "ctc_rescore_weight")
    options = {name: getattr(args, name) for name in search if getattr(args, name) is not None}
    model = speech_mt.load(args.checkpoint, args.device, args.data, **options)
    if not hasattr(model, "transcripts"):
        raise InputError(f"{args.checkpoint}: a model that translates text; give one of the task speech_manifest")
    if args.format == "tsv":
        print("id", "audio", "duration", "text", *["words"] * args.word_timestamps, sep="\t")
    failed = 0
    transcripts = model.transcripts(
        args.audio,
        word_timestamps=args.word_timestamps,
        chunk_seconds=args.chunk_seconds,
        overlap_seconds=args.overlap_seconds,
        batch_size=args.batch_size,
        beam=args.beam,
    )
    for name, transcript in zip(ids(args.audio), transcripts, strict=True):
        if transcript.error:
            failed += 1
            print(f"error: {transcript.error}", file=sys.stderr)
        if transcript.notes:
            print(f"{transcript.file}: {', '.join(transcript.notes)}", file=sys.stderr)
        line = FORMATS[args.format](name, transcript, args.word_timestamps)
        if line is not None:
            print(line, flush=True)
    if failed:
        print(f"{failed} of {len(args.audio)} files could not be transcribed", file=sys.stderr)
    return 1 if failed else 0


def ids(files: Sequence[str]) -> list[str]:
    """The files' names without folder and suffix where that tells them apart, else their paths."""
    stems = Counter(Path(file).stem for file in files)
    return [Path(file).stem if stems[Path(file).stem] == 1 else file for file in files]


def tsv(name: str, transcript: Transcript, word_timestamps: bool) -> str | None:
    if transcript.error:
        return None
    fields = [name, transcript.file, f"{transcript.seconds:.3f}", transcript.text]
    if word_timestamps:
        fields.append(" ".join(f"{word.start:.2f}-{word.end:.2f}:{word.word}" for word in transcript.words))
    return "\t".join(" ".join(field.split()) for field in fields)


def jsonl(name: str, transcript: Transcript, word_timestamps: bool) -> str:
    fields = {"id": name} | asdict(transcript)
    if not word_timestamps:
        del fields["words"]
    return json.dumps(fields, ensure_ascii=False)


FORMATS = {"text": lambda name, transcript, word_timestamps: transcript.text, "tsv": tsv, "jsonl": jsonl}


if __name__ == "__main__":
    run(main)
