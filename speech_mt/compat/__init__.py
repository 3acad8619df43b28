"""Every fix that fairseq needs on current Python, torch, numpy and torchaudio: one table, applied once.

``user_dir`` calls :func:`apply` first, so that the fixes act in every fairseq command, spawned worker and
torchrun child. A fix that its feature test finds unnecessary is skipped. What happens before ``user_dir`` is
imported cannot be mended from it: a warning at ``import fairseq``; in fairseq-hydra-train, all that precedes
training, so that ``common.user_dir`` has to be absolute, as ``${hydra:runtime.cwd}/user_dir`` is.

``python -m speech_mt.compat`` checks the environment and prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from speech_mt.compat import (
    checkpoints,
    combinations,
    data,
    edit_distance,
    empty_hypotheses,
    generation,
    interruption,
    languages,
    logs,
    mistakes,
    nan_detector,
    options,
    precision,
    prefetch,
    processes,
    raw_text,
    resuming,
    save_dir,
    training,
)
from speech_mt.compat.environment import check_environment

__all__ = ["FIXES", "Fix", "apply", "check_environment"]


@dataclass(frozen=True)
class Fix:
    """One fix: what it does, why it is needed, until when, the test that tells, and the fix itself."""

    what: str
    why: str
    until: str
    needed: Callable[[], bool]
    apply: Callable[[], None]


NEVER = "for as long as fairseq is what it is: its last release was 0.12"

FIXES: tuple[Fix, ...] = (
    Fix(
        "mistakes end in one line and exit code 1",
        "fairseq shows a traceback for a path that does not exist",
        NEVER,
        mistakes.hook_is_missing,
        mistakes.install_excepthook,
    ),
    Fix(
        "a mistyped option gets the nearest one",
        "argparse prints 200 lines of usage before the one that matters",
        NEVER,
        options.option_errors_are_pages,
        options.use_one_line_parser,
    ),
    Fix(
        "logs have the form and place that each command means them to have",
        "importing models/wav2vec/wav2vec2_classification.py runs logging.basicConfig(level=DEBUG) first",
        "that line is deleted",
        logs.root_logs_debug,
        logs.restore_logs,
    ),
    Fix(
        "warnings that a user can do nothing about are silent",
        "fairseq calls parts of torch and hydra that have newer names",
        "fairseq uses the newer names",
        logs.warns_in_vain,
        logs.silence_idle_warnings,
    ),
    Fix(
        "checkpoints load, and only what they need is allowed to",
        "torch >= 2.6 loads weights only; fairseq also keeps argparse.Namespace and numpy scalars, and rank "
        "0 sends omegaconf objects to the other ranks",
        "fairseq registers its own safe globals",
        checkpoints.namespaces_are_refused,
        checkpoints.allow_what_fairseq_saves,
    ),
    Fix(
        "a checkpoint of another depth or width is explained",
        "'Cannot load model parameters': fairseq names neither layers nor shapes",
        NEVER,
        checkpoints.mismatch_is_not_explained,
        checkpoints.explain_mismatch,
    ),
    Fix(
        "a resumed training is the uninterrupted one; a checkpoint of another function is refused",
        "weights that fit are taken under any --norm-placement; the step of the learning rate at the end of an "
        "epoch and the counts of --patience are lost; a --restore-file that does not exist starts anew",
        NEVER,
        resuming.resuming_forgets,
        resuming.resume_whole_or_not_at_all,
    ),
    Fix(
        "reduce_lr_on_plateau counts on after a resume",
        "its checkpoints hold the best loss and not the epochs since",
        NEVER,
        resuming.plateau_forgets,
        resuming.keep_plateau_counters,
    ),
    Fix(
        "a run resumed after its first epoch has the batches that it had; an epoch's data-loader workers end with it",
        "batches are drawn from seed + epoch once, in the epoch that a process begins with: within an epoch, some "
        "sentences are then seen twice and others not at all; where they are drawn anew for each epoch, workers are "
        "kept for the next one all the same, until they are collected as garbage and a time-out each has passed",
        NEVER,
        resuming.batches_depend_on_the_start,
        resuming.make_batches_as_at_the_start,
    ),
    Fix(
        "another number of processes goes on at the same place of the epoch",
        "the place is counted in batches of each process",
        NEVER,
        resuming.place_counts_own_batches,
        resuming.count_batches_of_all_ranks,
    ),
    Fix(
        "a criterion that cannot train the model is refused by name",
        "the first batch ends in a TypeError or an AttributeError",
        NEVER,
        combinations.criterion_is_unchecked,
        combinations.check_criterion_first,
    ),
    Fix(
        "an ensemble of different kinds of models is refused",
        "the first batch ends in a TypeError",
        NEVER,
        combinations.ensemble_is_unchecked,
        combinations.check_ensemble_first,
    ),
    Fix(
        "--ddp-backend fully_sharded is refused",
        "it asks for fairscale, which is no longer maintained",
        NEVER,
        combinations.sharding_asks_for_fairscale,
        combinations.refuse_sharding,
    ),
    Fix(
        "a number out of range is refused by its option's name",
        "--beam 0 and the like end in a traceback, or in nonsense",
        NEVER,
        options.numbers_are_unchecked,
        options.check_numbers,
    ),
    Fix(
        "--source-lang or --target-lang by itself is taken",
        "where one of them is missing, both are inferred from the data",
        NEVER,
        languages.one_language_is_ignored,
        languages.complete_languages_first,
    ),
    Fix(
        "a missing data folder is explained",
        "its name alone does not say what makes it",
        NEVER,
        data.missing_data_is_unexplained,
        data.explain_missing_data,
    ),
    Fix(
        "a training that has had its --max-update is left as it is",
        "each further start trains one update more, and saves it",
        NEVER,
        training.trains_beyond_the_end,
        training.end_in_time,
    ),
    Fix(
        "a --best-checkpoint-metric that is not measured is refused after a checkpoint, with those that are",
        "the first validation ends in a KeyError, and all before it is lost",
        NEVER,
        training.unknown_metric_is_fatal,
        training.save_before_refusing_a_metric,
    ),
    Fix(
        "fairseq-generate replaces the results of --results-path when the new ones are whole",
        "it empties the file before it looks at its options",
        NEVER,
        generation.results_are_overwritten,
        generation.keep_results_until_replaced,
    ),
    Fix(
        "SIGTERM and Ctrl-C save before they end a training",
        "what came since the last checkpoint is lost, or a rank waits for one that has gone",
        NEVER,
        interruption.ends_without_saving,
        interruption.save_before_ending,
    ),
    Fix(
        "a --save-dir is written by one training at a time",
        "two that save in the same folder overwrite each other's checkpoints in silence",
        NEVER,
        save_dir.is_shared_in_silence,
        save_dir.claim_before_training,
    ),
    Fix(
        "no half-written checkpoints",
        "checkpoint_last.pt is overwritten in place by a copy; a failed write goes on in the same file",
        "copies are renamed into place",
        checkpoints.copies_in_place,
        checkpoints.write_whole_or_not_at_all,
    ),
    Fix(
        "every sample is in a batch",
        "batch_by_size drops the last batch when it is no multiple of --required-batch-size-multiple (8), in "
        "training, validation and generation",
        "fairseq keeps it",
        data.last_batch_is_dropped,
        data.keep_last_batch,
    ),
    Fix(
        "the tasks masked_lm and language_modeling read their text",
        "TokenBlockDataset takes numpy.compat.long, which numpy 2 has no more",
        "fairseq takes int",
        data.numpy_compat_is_missing,
        data.provide_numpy_compat,
    ),
    Fix(
        "--scoring wer and the ctc criterion count word errors",
        "fairseq imports editdistance without asking for it to be installed",
        NEVER,
        edit_distance.editdistance_is_missing,
        edit_distance.provide_editdistance,
    ),
    Fix(
        "an empty hypothesis is scored",
        "fairseq-generate and --eval-bleu end in a segmentation fault, or divide by 0 if all of them are empty",
        NEVER,
        empty_hypotheses.empty_hypothesis_crashes,
        empty_hypotheses.score_empty_hypotheses,
    ),
    Fix(
        "raw text is split by --bpe sentencepiece as prepare_text.py does, and bytes come out as characters",
        "an uncovered </s> in the text ends the sentence there, and byte pieces are printed as <0xE2> <0x82> <0xAC>",
        NEVER,
        raw_text.bytes_are_printed,
        raw_text.spell_bytes,
    ),
    Fix(
        "fairseq-interactive gives a translation for each line of its input, and names a line that it cannot read",
        "a carriage return within a line makes two of it; bytes that are not UTF-8 end in a traceback",
        NEVER,
        raw_text.lines_are_split_at_carriage_returns,
        raw_text.read_lines_of_a_parallel_text,
    ),
    Fix(
        "a training that ends within an epoch exits cleanly",
        "the thread that prefetches batches is killed inside C++ code when Python exits: 'terminate called', code -6",
        "fairseq joins it (Python 3.14 no longer kills threads)",
        prefetch.prefetching_outlives_the_training,
        prefetch.end_prefetching_at_exit,
    ),
    Fix(
        "audio is resampled and mixed down without sox",
        "torchaudio >= 2.9 has no sox_effects; fairseq imports it even when there is nothing to convert",
        "fairseq uses torchaudio.functional",
        data.sox_is_missing,
        data.convert_without_sox,
    ),
    Fix(
        "--bf16 runs on CPUs and GPUs",
        "options.py sets args.tpu whenever args.bf16 is set",
        "bf16 no longer implies tpu there",
        options.bf16_means_tpu,
        options.bf16_needs_no_tpu,
    ),
    Fix(
        "--fp16 and --memory-efficient-fp16 run on CPUs",
        "master weights are keyed by the current GPU; an overflow makes its zero with .cuda()",
        NEVER,
        precision.fp16_asks_for_a_gpu,
        precision.fp16_on_cpu,
    ),
    Fix(
        "a NaN or Inf gradient ends in fairseq's message about it",
        "its NanDetector hooks every module the old way, which raises StopIteration on an encoder's dict of lists",
        "it uses full backward hooks",
        nan_detector.detector_uses_legacy_hooks,
        nan_detector.watch_leaves_with_full_hooks,
    ),
    Fix(
        "torchrun fairseq-train trains one model, on CPUs too",
        "the rank is taken modulo the number of GPUs, a process is spawned for each GPU, and with one GPU or "
        "none the default world size lets every process train alone",
        NEVER,
        processes.call_main_counts_gpus,
        processes.launch_from_torchrun,
    ),
    Fix(
        "fairseq-hydra-train under torchrun says what to add",
        "it has decided on a single process before it imports user_dir",
        NEVER,
        processes.hydra_trains_alone,
        processes.refuse_to_train_alone,
    ),
    Fix(
        "DistributedDataParallel wraps a model on a CPU",
        "fairseq always passes device_ids",
        NEVER,
        processes.ddp_wants_devices,
        processes.ddp_on_cpu,
    ),
    Fix(
        "statistics that cannot be summed are gathered on CPUs",
        "all_gather_list keeps its buffer in a torch.cuda.ByteTensor",
        NEVER,
        processes.gathers_on_gpu,
        processes.gather_on_cpu,
    ),
    Fix(
        "fairseq-validate runs without --task",
        "its default task is None, which is then looked up",
        NEVER,
        options.validate_has_no_task,
        options.default_to_translation,
    ),
)


def apply() -> None:
    """Check the environment, then apply every fix of :data:`FIXES` that is needed. A second call finds none.

    Raises:
        InputError: a package is missing or does not fit the others; the message says what to install.
    """
    mistakes.install_excepthook()
    check_environment()
    logs.import_in_silence()
    for fix in FIXES:
        if fix.needed():
            fix.apply()
