"""The demo: a deep Transformer that stalls, the same one that learns, and a speech model: trained, decoded, scored.

Every step is a command that you could type; each is printed, its output goes to OUT/<run>/<step>.log, and what is done
is not done again. Interrupt it whenever you like: training goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from speech_mt.errors import InputError, run
from speech_mt.experiments.commands import BIN, Progress, run_command
from speech_mt.plotting.figures import make_figure
from speech_mt.plotting.runs import load_run

ROOT = Path(__file__).parents[2]
_UPDATE = re.compile(r"num_updates=(\d+)")


@dataclass(frozen=True)
class Experiment:
    """One model of the demo."""

    name: str
    method: str
    data: str  # below OUT/data
    updates: int
    train: str
    generate: str
    metric: str
    layers: str  # whose entropy and cosine the table shows


_TRANSLATION = (
    "--task translation --encoder-layers 18 --decoder-layers 18 --encoder-embed-dim 64 --decoder-embed-dim 64 "
    "--encoder-ffn-embed-dim 256 --decoder-ffn-embed-dim 256 --encoder-attention-heads 4 --decoder-attention-heads 4 "
    "--share-all-embeddings --dropout 0 --criterion label_smoothed_cross_entropy_with_entropy --label-smoothing 0.1 "
    "--max-tokens 1600 --lr 2e-3 --lr-scheduler inverse_sqrt --warmup-updates 100 --disable-validation"
)
_DECODE_TEXT = "--task translation --beam 1 --max-len-b 40 --batch-size 100 --remove-bpe sentencepiece"
EXPERIMENTS = (
    Experiment(
        "sigma_reparam",
        "18L-18L post-LN + sigmaReparam",
        "mt/bin",
        450,
        f"--arch spectral_transformer --reparam sigma {_TRANSLATION}",
        _DECODE_TEXT,
        "BLEU",
        "decoder",
    ),
    Experiment(
        "speech",
        "speech, 4L CTC encoder",
        "speech",
        900,
        "--task speech_manifest --arch spectral_ctc_transformer_tiny --criterion ctc_with_entropy "
        "--batch-size 24 --lr 2e-3 --lr-scheduler polynomial_decay --warmup-updates 100 --total-num-update 900 "
        "--best-checkpoint-metric wer --num-workers 0",
        "--task speech_manifest --batch-size 50",
        "WER",
        "encoder",
    ),
    Experiment(
        "post_ln",
        "18L-18L post-LN (stock fairseq)",
        "mt/bin",
        450,
        f"--arch transformer {_TRANSLATION}",
        _DECODE_TEXT,
        "BLEU",
        "decoder",
    ),
)
_TRAIN = (
    "--user-dir user_dir --cpu --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 "
    "--monitor entropy,smoothing --log-format simple --log-interval 10 --seed 1 "
    "--save-interval-updates 100 --keep-interval-updates 1 --no-epoch-checkpoints"
)


def train_and_decode(experiment: Experiment, out: Path, updates: int, progress: Progress) -> None:
    """One model, from data to translations or transcripts of the test set."""
    folder, data = out / experiment.name, shlex.quote(str(out / "data" / experiment.data))
    quoted = shlex.quote(str(folder))

    def updates_done(log: str) -> str:
        found = _UPDATE.findall(log)
        return f"{found[-1] if found else 0}/{updates}"

    train = shlex.split(
        f"fairseq-train {data} {experiment.train} {_TRAIN} --max-update {updates} "
        f"--save-dir {quoted}/checkpoints --tensorboard-logdir {quoted}/tensorboard"
    )
    run_command(folder, "train", train, root=ROOT, progress=progress, state=updates_done)
    generate = shlex.split(
        f"fairseq-generate {data} --user-dir user_dir --cpu {experiment.generate} --gen-subset test "
        f"--path {quoted}/checkpoints/checkpoint_last.pt --results-path {quoted}/test"
    )
    run_command(folder, "generate", generate, root=ROOT, progress=progress)


def score(experiment: Experiment, out: Path) -> float:
    """What scripts/score_bleu.py or score_wer.py says of the decoded test set."""
    script = ROOT / "scripts" / f"score_{experiment.metric.lower()}.py"
    hypotheses = out / experiment.name / "test" / "generate-test.txt"
    arguments = [sys.executable, str(script), str(hypotheses), "--json"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if result.returncode:
        raise InputError(f"{shlex.join(arguments)}: {result.stderr.strip()}")
    report = json.loads(result.stdout)
    return report["wer"] if experiment.metric == "WER" else report["scores"][0]["score"]


def table(out: Path) -> str:
    """A row a model: training loss, score, and how alike attention and tokens are in the deepest layer."""
    lines = [f"{'':34}{'loss':>7}{'score':>14}{'entropy':>10}{'cosine':>9}"]
    for experiment in EXPERIMENTS:
        training = load_run(out / experiment.name / "tensorboard")
        loss = training.scalar("loss").values[-1]
        entropy, cosine = (
            training.layers(f"{quantity}/{experiment.layers}").values[-1, -1]
            for quantity in ("entropy_normalised", "cosine")
        )
        result = f"{experiment.metric} {score(experiment, out):.1f}"
        lines.append(f"{experiment.method:34}{loss:7.2f}{result:>14}{entropy:10.3f}{cosine:9.3f}")
    lines.append(
        "loss: bits a token (speech: a letter) at the last log interval. entropy: of self-attention in the last layer\n"
        "of the decoder (speech: encoder), over log(keys); 1 = uniform. cosine: of its tokens; 1 = all alike."
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "numbers", help="folder for everything it makes")
    parser.add_argument("--smoke", action="store_true", help="a small corpus and a few updates: does everything run?")
    args = parser.parse_args()
    out = args.out.resolve()
    progress = Progress()
    prepare = [sys.executable, str(ROOT / "examples/numbers/prepare.py"), "--out", str(out / "data")]
    run_command(out / "data", "prepare", prepare + ["--smoke"] * args.smoke, root=ROOT, progress=progress)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = [pool.submit(train_and_decode, e, out, 10 if args.smoke else e.updates, progress) for e in EXPERIMENTS]
        for job in jobs:
            job.result()
    progress.say("\n" + table(out))
    translation = [e for e in EXPERIMENTS if e.metric == "BLEU"]
    runs = [load_run(out / e.name / "tensorboard", e.method) for e in translation]
    picture = out / "demo.png"
    make_figure(runs, "German to English number words, learning rate 2e-3, warm-up 100").savefig(picture, dpi=110)
    print(f"\npicture: {picture}\ncurves:  {BIN}/tensorboard --logdir {out}")


if __name__ == "__main__":
    run(main)
