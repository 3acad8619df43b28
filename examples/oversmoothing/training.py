"""One trial in this process: train, measure how alike tokens are by layer, score on the clean and on spoilt test sets.

fairseq parses the options and builds task, model, criterion, optimizer and batches, through the stability study's loop.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
from controls import CONTROLS
from trials import TASKS, Layer, Result, Score, Spoilt, Trial, Value

from speech_mt.diagnostics.smoothing_theory import LayerSmoothing, smoothing_by_layer
from speech_mt.experiments.table import write_table

sys.path.append(str(Path(__file__).resolve().parents[1] / "stability"))

PROBED = 16  # sentences or images of the test set whose layers are looked at
TESTED = 200  # sentences of the translation test set
SMOOTHING = ("cosine", "hfc_lfc", "rank_residual")
Rows = dict[Layer, Value]
Scorer = Callable[[str, float], float]


def train_and_measure(
    trial: Trial, data: str, folder: str, commit: str, machine: str
) -> tuple[Result, dict[Spoilt, Score]]:
    """The row of a trial, and a row for every spoilt test set; ``folder/layers.csv`` has the layers' measures.

    Args:
        data: the corpus, relative to the repository's root, where this runs; "" for images.
    """
    run = _images if trial.task == "images" else _fairseq
    layers, loss, rate, score, command = run(trial, data, folder)
    write_table(Path(folder) / "layers.csv", layers, Layer, Value)
    last = {measure: layers.get(Layer(trial.updates, measure, "encoder", trial.layers - 1)) for measure in SMOOTHING}
    cosine, hfc_lfc = (last[m].value if last[m] else math.nan for m in ("cosine", "hfc_lfc"))
    clean = score("", 0.0) if math.isfinite(loss) else math.nan
    spoilt = {}
    if math.isfinite(clean):
        for kind, levels in TASKS[trial.task].corruptions.items():
            for level in levels:
                spoilt[trial.spoilt(kind, level)] = Score(score(kind, level))
    return Result(clean, loss, cosine, hfc_lfc, rate, commit, machine, command), spoilt


def theory(rows: Iterable[LayerSmoothing], update: int) -> Rows:
    """Rows of a whole measurement, predictions and all."""
    measures = [field.name for field in fields(LayerSmoothing) if field.name not in ("stack", "layer")]
    return {Layer(update, m, row.stack, row.layer): Value(getattr(row, m)) for row in rows for m in measures}


def _fairseq(trial: Trial, data: str, folder: str) -> tuple[Rows, float, float, Scorer, str]:
    import shlex

    from fairseq_run import build_trainer, first_sentences, training_curve

    command = trial.command(data, folder)
    trainer = build_trainer(command)
    model, task = trainer.get_model(), trainer.task
    task.load_dataset("test")
    probe = first_sentences(task.dataset("test"), PROBED)
    padding = probe["net_input"]["prev_output_tokens"].eq(task.target_dictionary.pad())

    def look(update: int) -> Rows:
        return theory(smoothing_by_layer(model, probe["net_input"], padding), update)

    rows, loss, start = look(0), math.nan, time.time()
    try:
        for stats in training_curve(trainer):
            loss = stats["loss"]
            for name, value in stats.items():
                measure, *place = name.split("/")
                if measure in SMOOTHING and len(place) == 2:
                    rows[Layer(trainer.get_num_updates(), measure, place[0], int(place[1]))] = Value(float(value))
    except FloatingPointError:
        loss = math.nan
    rate = trainer.get_num_updates() / (time.time() - start)
    if math.isfinite(loss):
        rows |= look(trainer.get_num_updates())
    score = _bleu(trainer, data) if trial.task == "numbers" else _wer(trainer)
    return rows, loss, rate, score, shlex.join(command)


def _bleu(trainer: object, data: str) -> Scorer:
    """sacreBLEU, greedy, of sources with character noise, cut into pieces as the training text was."""
    import sentencepiece
    from fairseq import utils
    from fairseq.dataclass.configs import GenerationConfig
    from sacrebleu.metrics import BLEU

    from speech_mt.data.corruption import corrupt_text

    task, model = trainer.task, trainer.get_model()
    dictionary, corpus = task.source_dictionary, Path(data).parent
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(corpus / "spm.model"))
    sources, references = (
        (corpus / "raw" / f"test.{language}").read_text(encoding="utf-8").splitlines()[:TESTED]
        for language in (task.cfg.source_lang, task.cfg.target_lang)
    )
    generator = task.build_generator([model], GenerationConfig(beam=1, max_len_b=60))

    def score(kind: str, level: float) -> float:
        random = np.random.default_rng(0)
        texts = [corrupt_text(source, level, random) if kind else source for source in sources]
        ids = [
            dictionary.encode_line(" ".join(pieces.encode(text, out_type=str)), add_if_not_exist=False).long()
            for text in texts
        ]
        dataset = task.build_dataset_for_inference(ids, [len(x) for x in ids])
        sample = dataset.collater([dataset[i] for i in range(len(dataset))])
        model.eval()
        found = {
            int(i): task.target_dictionary.string(utils.strip_pad(hypotheses[0]["tokens"], 1), "sentencepiece")
            for i, hypotheses in zip(sample["id"], task.inference_step(generator, [model], sample), strict=True)
        }
        return BLEU().corpus_score([found[i] for i in range(len(found))], [references]).score

    return score


def _wer(trainer: object) -> Scorer:
    """Greedy word error rate of the test set, from its audio."""
    from fairseq.dataclass.configs import GenerationConfig
    from rapidfuzz.distance import Levenshtein

    from speech_mt.data.audio import read_audio
    from speech_mt.data.corruption import corrupt_audio
    from speech_mt.data.features import log_mel_filterbank, normalize

    task, model = trainer.task, trainer.get_model()
    dataset = task.dataset("test")
    manifest, features = dataset.manifest, dataset.features
    audio = [read_audio(manifest.audio_path(row), features.sample_rate, resample=True) for row in range(len(manifest))]
    references = [manifest.field(row, "text").split() for row in range(len(manifest))]
    generator = task.build_generator([model], GenerationConfig(beam=1))

    def batches(kind: str, level: float) -> Iterator[dict]:
        random = np.random.default_rng(0)
        sources = []
        for samples in audio:
            spoilt = corrupt_audio(samples, features.sample_rate, kind, level, random) if kind else samples
            log_mel = log_mel_filterbank(spoilt, features.sample_rate, features.num_mel_bins)
            sources.append(normalize(log_mel, features.normalization))
        for first in range(0, len(sources), 50):
            some = sources[first : first + 50]
            padded = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
            yield {"net_input": {"src_tokens": padded, "src_lengths": torch.tensor([len(s) for s in some])}}

    def score(kind: str, level: float) -> float:
        model.eval()
        hypotheses = [
            task.words(found[0]["tokens"])
            for batch in batches(kind, level)
            for found in task.inference_step(generator, [model], batch)
        ]
        errors = sum(map(Levenshtein.distance, references, hypotheses))
        return 100 * errors / sum(map(len, references))

    return score


def _images(trial: Trial, data: str, folder: str) -> tuple[Rows, float, float, Scorer, str]:
    import images

    training, test = images.load_digits(trial.share, trial.seed)
    torch.manual_seed(trial.seed)
    model = CONTROLS[trial.control].image_classifier(trial.layers, **images.IMAGE)

    def look(update: int) -> Rows:
        return theory(smoothing_by_layer(model, {"images": test.pixels[:PROBED]}), update)

    rows, start = look(0), time.time()

    def see(update: int, loss: float) -> None:
        rows.update(look(update))

    loss = images.train(model, training, trial.updates, trial.seed, see)
    rate = trial.updates / (time.time() - start)

    def score(kind: str, level: float) -> float:
        return images.accuracy(model, images.with_noise(test, level) if kind else test)

    command = f"python examples/oversmoothing/images.py --control '{trial.control}' --layers {trial.layers} "
    command += f"--updates {trial.updates} --share {trial.share:g} --seed {trial.seed}"
    return rows, loss, rate, score, command
