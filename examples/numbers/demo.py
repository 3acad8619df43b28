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
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from speech_mt.errors import InputError, run
from speech_mt.plotting.figures import make_figure
from speech_mt.plotting.runs import load_run

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
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


class Progress:
    """One line for all running commands: rewritten in a terminal, repeated every 15 seconds elsewhere."""

    def __init__(self) -> None:
        self.running: dict[str, str] = {}
        self._shown = 0.0

    def show(self) -> None:
        line = " | ".join(f"{name} {state}" for name, state in self.running.items())
        if sys.stdout.isatty():
            print(f"\r\033[K{line[:150]}", end="", flush=True)
        elif time.time() - self._shown > 15:
            self._shown = time.time()
            print(line, flush=True)

    def say(self, text: str) -> None:
        print(f"\r\033[K{text}" if sys.stdout.isatty() else text, flush=True)


def command(
    folder: Path, step: str, arguments: list[str], state: Callable[[str], str] | None, progress: Progress
) -> None:
    """Run one command unless it was completed before; its output goes to ``folder/step.log``.

    Raises:
        InputError: the command failed; names its log.
    """
    done = folder / f"{step}.completed"
    if done.exists() and json.loads(done.read_text()) == arguments:
        progress.say(f"{folder.name} {step}: done already")
        return
    folder.mkdir(parents=True, exist_ok=True)
    progress.say(f"$ {shlex.join(arguments)}")
    log = folder / f"{step}.log"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
    with log.open("ab") as output:
        output.write(f"$ {shlex.join(arguments)}\n".encode())
        start = output.tell()
        process = subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    key = f"{folder.name} {step}"
    try:
        while process.poll() is None:
            if state is None:
                progress.running[key] = "..."
            else:
                with log.open("rb") as text:
                    text.seek(max(start, log.stat().st_size - 20_000))
                    progress.running[key] = state(text.read().decode(errors="replace"))
            progress.show()
            time.sleep(1)
    finally:
        process.terminate()
        progress.running.pop(key, None)
    if process.returncode < 0:
        raise InputError(f"{key} was ended by signal {-process.returncode} (its output is in {log})")
    if process.returncode:
        tail = log.read_text(errors="replace").strip().splitlines()[-1]
        raise InputError(f"{key} failed with {process.returncode}: {tail} (all of it is in {log})")
    done.write_text(json.dumps(arguments))


def train_and_decode(experiment: Experiment, out: Path, updates: int, progress: Progress) -> None:
    """One model, from data to translations or transcripts of the test set."""
    folder, data = out / experiment.name, out / "data" / experiment.data

    def updates_done(log: str) -> str:
        found = _UPDATE.findall(log)
        return f"{found[-1] if found else 0}/{updates}"

    train = shlex.split(
        f"fairseq-train {data} {experiment.train} {_TRAIN} --max-update {updates} "
        f"--save-dir {folder}/checkpoints --tensorboard-logdir {folder}/tensorboard"
    )
    command(folder, "train", train, updates_done, progress)
    generate = shlex.split(
        f"fairseq-generate {data} --user-dir user_dir --cpu {experiment.generate} --gen-subset test "
        f"--path {folder}/checkpoints/checkpoint_last.pt --results-path {folder}/test"
    )
    command(folder, "generate", generate, None, progress)


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
    command(out / "data", "prepare", prepare + ["--smoke"] * args.smoke, None, progress)
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
