"""One training of the study: what its fairseq-train command computes, in this process, stopped when it is decided.

Importing fairseq costs as much as a shallow run, so a process imports it once and trains many models. Options are
parsed, and task, model, criterion, optimizer, schedule and batches built, by fairseq; nothing that is measured on the
way changes a number of the training.
"""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from fairseq import options, tasks, utils
from fairseq.data import LanguagePairDataset, iterators
from fairseq.dataclass.configs import GenerationConfig
from fairseq.dataclass.initialize import add_defaults
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.trainer import Trainer
from grid import Result, Trial
from outcome import decided, final
from sacrebleu.metrics import BLEU
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from speech_mt.diagnostics.attention_entropy import max_logit
from speech_mt.diagnostics.monitor import attention_sites

PROBED = 16  # sentences of the validation set whose attention logits are looked at
TRANSLATED = 200  # sentences of the test set
CURVES = ("loss", "nll_loss", "gnorm", "lr", "entropy_normalised", "cosine")


def build_trainer(command: list[str]) -> Trainer:
    """The trainer of a fairseq-train command, before its first update."""
    arguments = command[1:]
    user_dir = options.argparse.Namespace(user_dir=arguments[arguments.index("--user-dir") + 1])
    utils.import_user_module(user_dir)  # before the parser is made: it lists what is registered
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), arguments))
    add_defaults(cfg)
    metrics.reset()
    np.random.seed(cfg.common.seed)
    utils.set_torch_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    model = task.build_model(cfg.model)
    return Trainer(cfg, task, model, task.build_criterion(cfg.criterion))


def training_curve(trainer: Trainer) -> Iterator[dict[str, float]]:
    """fairseq-train's loop; yields the statistics of each log interval, as fairseq logs them.

    Raises:
        FloatingPointError: the loss or a gradient is not finite.
    """
    cfg = trainer.cfg
    epoch = trainer.get_train_iterator(epoch=1, load_dataset=True)
    trainer.lr_step(epoch.epoch)
    while True:
        batches = epoch.next_epoch_itr(
            fix_batches_to_gpus=cfg.distributed_training.fix_batches_to_gpus,
            shuffle=epoch.next_epoch_idx > cfg.dataset.curriculum,
        )
        trainer.begin_epoch(epoch.epoch)
        for samples in iterators.GroupedIterator(batches, 1):
            with metrics.aggregate("train_inner"):
                trainer.train_step(samples)
            if why := trainer.get_criterion().nonfinite.stop:
                raise FloatingPointError(why)
            updates = trainer.get_num_updates()
            if updates % cfg.common.log_interval == 0:
                yield metrics.get_smoothed_values("train_inner")
                metrics.reset_meters("train_inner")
            if updates >= cfg.optimization.max_update:
                return
        trainer.lr_step(epoch.epoch)
        epoch = trainer.get_train_iterator(epoch.next_epoch_idx, load_dataset=False)


def train_and_measure(trial: Trial, data: str, folder: str, commit: str, machine: str) -> Result:
    """Train until it is decided, then validate and translate. Curves go to ``folder`` for TensorBoard."""
    shutil.rmtree(folder, ignore_errors=True)
    Path(folder).mkdir(parents=True)
    command = trial.command(data, folder)
    start = time.time()
    trainer = build_trainer(command)
    model, task = trainer.get_model(), trainer.task
    task.load_dataset("valid")
    probe = first_sentences(task.dataset("valid"), PROBED)

    losses, logits = [], [largest_logit(model, probe)]
    outcome, stats = None, {}
    with SummaryWriter(f"{folder}/train_inner") as curves:
        try:
            for stats in training_curve(trainer):
                losses.append(stats["loss"])
                logits.append(largest_logit(model, probe))
                write(curves, stats | {"max_logit": logits[-1]}, trainer.get_num_updates())
                outcome = decided(
                    losses, min(_last_cosine(stats, stack, trial.depth) for stack in ("encoder", "decoder"))
                )
                if outcome:
                    break
        except FloatingPointError:
            outcome = "diverged"
            losses.append(math.nan)
    seconds = time.time() - start
    outcome = outcome or final(losses)
    usable = all(p.isfinite().all() for p in model.parameters()) and math.isfinite(losses[-1])
    return Result(
        outcome=outcome,
        updates=trainer.get_num_updates(),
        loss=losses[-1],
        valid_loss=validation_loss(trainer) if usable else math.nan,
        bleu=greedy_bleu(trainer) if usable else math.nan,
        entropy=min((v for k, v in stats.items() if k.startswith("entropy_normalised/")), default=math.nan),
        cosine_encoder=_last_cosine(stats, "encoder", trial.depth),
        cosine_decoder=_last_cosine(stats, "decoder", trial.depth),
        max_logit=max((x for x in logits if math.isfinite(x)), default=math.nan),
        seconds=seconds,
        commit=commit,
        machine=machine,
        command=shlex.join(command),
    )


def _last_cosine(stats: dict[str, float], stack: str, depth: int) -> float:
    return stats.get(f"cosine/{stack}/{depth - 1:02d}", math.nan)


def write(curves: SummaryWriter, stats: dict[str, float], updates: int) -> None:
    """Those of the statistics that are worth a curve."""
    for name, value in stats.items():
        if name.split("/")[0] in (*CURVES, "max_logit"):
            curves.add_scalar(name, value, updates)


def first_sentences(dataset: LanguagePairDataset, count: int) -> dict:
    """The first sentences of a data set, as one batch."""
    return dataset.collater([dataset[i] for i in range(min(count, len(dataset)))])


@torch.no_grad()
def largest_logit(model: nn.Module, sample: dict) -> float:
    """Of all attentions of the model, before any softcap, over real queries and visible keys."""
    inputs = sample["net_input"]
    target_padding_mask = inputs["prev_output_tokens"].eq(model.decoder.padding_idx)
    largest = []
    sites = attention_sites(model)
    for site in sites:

        def observe(module, q, k, key_padding_mask, causal, kind=site.kind):  # noqa: ANN001, ANN202
            queries = key_padding_mask if kind == "encoder" else target_padding_mask
            largest.append(max_logit(q, k, key_padding_mask, causal, module.scale, queries).max())

        site.module.observer = observe
    model.eval()
    model(**inputs)
    for site in sites:
        site.module.observer = None
    return torch.stack(largest).max().item()


def validation_loss(trainer: Trainer) -> float:
    """Bits a token of the validation set, as fairseq validates."""
    with metrics.aggregate(new_root=True) as validation:
        for sample in trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False, set_dataset_epoch=False):
            trainer.valid_step(sample)
    return validation.get_smoothed_values()["loss"]


def greedy_bleu(trainer: Trainer) -> float:
    """sacreBLEU of greedy translations of the first sentences of the test set."""
    task, model = trainer.task, trainer.get_model()
    task.load_dataset("test")
    sample = first_sentences(task.dataset("test"), TRANSLATED)
    model.eval()
    generator = task.build_generator([model], GenerationConfig(beam=1, max_len_b=40))
    translations = task.inference_step(generator, [model], sample)
    dictionary = task.target_dictionary

    def text(tokens: torch.Tensor) -> str:
        return dictionary.string(utils.strip_pad(tokens, dictionary.pad()), "sentencepiece")

    hypotheses = [text(translation[0]["tokens"]) for translation in translations]
    return BLEU().corpus_score(hypotheses, [[text(target) for target in sample["target"]]]).score
