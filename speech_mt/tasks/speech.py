"""The fairseq task ``speech_manifest``: from speech to text, by CTC or with a decoder."""

from __future__ import annotations

import logging
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from fairseq.data import Dictionary
from fairseq.data.data_utils import post_process
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import GenerationConfig
from fairseq.logging import metrics
from fairseq.optim import FairseqOptimizer
from fairseq.tasks import FairseqTask, register_task
from rapidfuzz.distance import Levenshtein
from torch import Tensor, nn

from speech_mt.data.audio import audio_duration
from speech_mt.data.features import FeatureConfig
from speech_mt.data.manifest import Manifest, manifest_bytes, read_manifest
from speech_mt.data.specaugment import POLICIES, apply_masks
from speech_mt.data.speech_dataset import TOO_SHORT, SpeechDataset
from speech_mt.data.speed import SpeedPerturbation
from speech_mt.data.transcripts import CharacterTokenizer, SentencePieceTokenizer, Tokenizer
from speech_mt.decoding.ctc_generator import CTCGenerator, Decoder
from speech_mt.decoding.ctc_greedy import best_path
from speech_mt.decoding.ctc_prefix_beam import PrefixBeamSearch
from speech_mt.decoding.ctc_rescoring import CTCRescoringGenerator
from speech_mt.decoding.word_language_model import WordLanguageModel
from speech_mt.errors import InputError
from speech_mt.models.combination import check_reads_features, is_ctc
from speech_mt.ranges import check_ranges
from speech_mt.tasks.speech_config import RANGES, SpeechManifestConfig

logger = logging.getLogger(__name__)

_SHOWN = 20  # ids or characters named in a message
_CHARACTERS_PER_FRAME = 0.25  # 25 a second, faster than anyone speaks


@register_task("speech_manifest", dataclass=SpeechManifestConfig)
class SpeechManifestTask(FairseqTask):
    """Transcribe the utterances of manifests.

    The symbol ``<s>`` of the dictionary, id 0, is the CTC blank, as fairseq's ``ctc`` criterion takes it.
    """

    def __init__(self, cfg: SpeechManifestConfig, dictionary: Dictionary, tokenizer: Tokenizer) -> None:
        super().__init__(cfg)
        self.dictionary = dictionary
        self.tokenizer = tokenizer
        self.wer_generator = None
        self.told: set[str] = set()
        self.skips_nonfinite = False
        self.features = FeatureConfig(
            cfg.sample_rate, cfg.resample, cfg.num_mel_bins, str(cfg.features_normalization)
        )

    @classmethod
    def setup_task(cls, cfg: SpeechManifestConfig, **kwargs: object) -> SpeechManifestTask:
        """Load the dictionary; :class:`InputError` names what the data folder lacks, or an option out of range."""
        check_ranges(cfg, RANGES)
        folder = Path(cfg.data)
        if not folder.is_dir():
            raise InputError(f"{folder}: no such data folder; it holds train.tsv, valid.tsv and dict.txt")
        vocab_type = str(cfg.vocab_type)
        for name in ["dict.txt"] if vocab_type == "char" else ["dict.txt", "spm.model"]:
            if not (folder / name).is_file():
                raise InputError(
                    f"{folder / name}: no such file; make it by python scripts/build_vocabulary.py "
                    f"{folder / 'train.tsv'} --vocab-type {vocab_type}"
                )
        try:
            dictionary = Dictionary.load(str(folder / "dict.txt"))
        except Exception as error:  # fairseq raises whatever comes, and does not name the file
            raise InputError(f"{folder / 'dict.txt'}: not a fairseq dictionary ({error})") from None
        if vocab_type == "char":
            tokenizer = CharacterTokenizer(dictionary.indices, cfg.lowercase)
        else:
            tokenizer = SentencePieceTokenizer(folder / "spm.model", dictionary.indices, cfg.lowercase)
        logger.info(f"{folder / 'dict.txt'}: {len(dictionary)} symbols")
        return cls(cfg, dictionary, tokenizer)

    @property
    def target_dictionary(self) -> Dictionary:
        return self.dictionary

    @property
    def source_dictionary(self) -> None:
        return None

    def max_positions(self) -> tuple[int, int]:
        """Most frames and most target ids."""
        return self.cfg.max_source_positions, self.cfg.max_target_positions

    def load_dataset(
        self, split: str, combine: bool = False, task_cfg: FairseqDataclass | None = None, **kwargs: object
    ) -> None:
        """Read ``split``.tsv; ``--train-subset`` is shuffled and masked, unless to evaluate a checkpoint.

        Raises:
            InputError: if the file is missing or faulty (see :class:`Manifest`), or a training transcript
                holds characters that the dictionary lacks; in other splits these are reported.
        """
        evaluating = task_cfg is not None  # fairseq-generate and -validate pass the checkpoint's
        path = Path(self.cfg.data) / f"{split}.tsv"
        if not path.is_file():
            splits = ", ".join(sorted(file.stem for file in path.parent.glob("*.tsv"))) or "none"
            raise InputError(f"{path}: no such manifest; splits found in {path.parent}: {splits}")
        dataset = self._dataset(
            read_manifest(path), training=split == self.cfg.train_subset and not evaluating
        )
        self._check_characters(dataset)
        self.datasets[split] = dataset

    def _dataset(self, manifest: Manifest, training: bool = False) -> SpeechDataset:
        return SpeechDataset(
            manifest,
            self.features,
            self.tokenizer,
            pad=self.dictionary.pad(),
            eos=self.dictionary.eos(),
            training=training,
            specaugment=POLICIES[str(self.cfg.specaugment)],
            speed_perturbation=SpeedPerturbation.parse(self.cfg.speed_perturb),
            seed=self.cfg.seed,
            ctc_subsampling=self.cfg.ctc_subsampling,
            allow_nonfinite=training and self.skips_nonfinite,
        )

    def _check_characters(self, dataset: SpeechDataset) -> None:
        rows = np.flatnonzero(dataset.targets.unknown)
        if len(rows) == 0:
            return
        texts = (dataset.manifest.field(row, "text") for row in rows)
        counts = Counter(character for text in texts for character in self.tokenizer.unknown(text))
        characters = _some([repr(character) for character, _ in counts.most_common()])
        message = (
            f"{dataset.manifest.path}: {len(rows)} of {len(dataset)} transcripts hold characters that "
            f"dict.txt lacks ({characters}), first utterance {dataset.manifest.field(rows[0], 'id')!r}"
        )
        if dataset.training:
            raise InputError(
                f"{message}; clean the transcripts, set --lowercase, or build the dictionary from them"
            )
        logger.warning(f"{message}; the model cannot get these words right")

    def filter_indices_by_size(
        self,
        indices: np.ndarray,
        dataset: SpeechDataset,
        max_positions: tuple[int | None, int | None] | None = None,
        ignore_invalid_inputs: bool = False,
    ) -> np.ndarray:
        """Leave out what cannot be used and say which and why; fairseq allows that in training.

        Raises:
            InputError: if it is not allowed, or nothing is left.
        """
        max_positions = max_positions or self.max_positions()
        for reason, rows in dataset.exclusions(indices, max_positions).items():
            ids = _some([dataset.manifest.field(row, "id") for row in rows])
            message = (
                f"{dataset.manifest.path}: {len(rows)} of {len(indices)} utterances have {reason}: {ids}"
            )
            if not ignore_invalid_inputs:
                limit = "" if reason == TOO_SHORT else "raise --max-source-positions or --max-target-positions, "
                raise InputError(
                    f"{message}; {limit}remove them from the manifest, or skip them with "
                    "--skip-invalid-size-inputs-valid-test"
                )
            if message not in self.told:  # training batches are made every epoch
                self.told.add(message)
                logger.warning(f"{message}; skipped")
        indices, _ = dataset.filter_indices_by_size(indices, max_positions)
        if len(indices) == 0:
            raise InputError(f"{dataset.manifest.path}: no utterance is left")
        return indices

    def get_interactive_tokens_and_lengths(
        self, lines: list[str], encode_fn: object
    ) -> tuple[list[Path], list[float]]:
        """The paths and seconds of audio files: fairseq-interactive's input lines are paths."""
        paths = [Path(line).absolute() for line in lines]
        return paths, [audio_duration(path) for path in paths]

    def build_dataset_for_inference(
        self, src_tokens: list[Path], src_lengths: list[float], **kwargs: object
    ) -> SpeechDataset:
        """Utterances without transcripts, from :meth:`get_interactive_tokens_and_lengths`."""
        rows = [
            {"id": k, "audio": path, "duration": seconds, "text": "", "speaker": ""}
            for k, (path, seconds) in enumerate(zip(src_tokens, src_lengths, strict=True))
        ]
        source = Path("interactive input")
        return self._dataset(Manifest(source, manifest_bytes(source, rows)))

    def build_model(self, cfg: FairseqDataclass | Namespace, from_checkpoint: bool = False) -> nn.Module:
        """Build the model; fairseq's own speech-to-text architectures find the input's size in ``cfg``."""
        check_reads_features(getattr(cfg, "_name", None) or getattr(cfg, "arch", ""), "speech_manifest")
        if isinstance(cfg, Namespace):
            cfg.input_feat_per_channel, cfg.input_channels = self.cfg.num_mel_bins, 1
        model = super().build_model(cfg, from_checkpoint)
        if self.cfg.eval_wer or is_ctc(model):
            self.wer_generator = self.build_generator([model], Namespace(beam=1))
        return model

    def build_criterion(self, cfg: FairseqDataclass, from_checkpoint: bool = False) -> nn.Module:
        """The criterion; if it skips batches that are not finite, the training data need not be."""
        self.skips_nonfinite = getattr(cfg, "skip_nonfinite", 0) > 0
        return super().build_criterion(cfg, from_checkpoint)

    def build_generator(
        self,
        models: list[nn.Module],
        args: Namespace | Mapping | GenerationConfig,
        seq_gen_cls: type | None = None,
        extra_gen_cls_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> nn.Module | CTCGenerator | CTCRescoringGenerator:
        """CTC models: best path or prefix beam search. With a decoder: fairseq's beam search, perhaps rescored by CTC.

        fairseq ends a hypothesis after ``--max-len-b`` 200 units, too few for the characters of a long
        utterance: if the limit is left at that, characters get 25 more per second.

        Raises:
            InputError: a decoding option that this kind of model has no use for.
        """
        self._check_decoding_options(ctc=is_ctc(models[0]))
        options = Namespace(**(args if isinstance(args, Mapping) else vars(args)))
        if is_ctc(models[0]):
            if (extra_gen_cls_kwargs or {}).get("lm_model") is not None:
                raise InputError("CTC decoding takes no neural language model; leave out --lm-path, or give --ctc-lm")
            decode = self._ctc_decoder(getattr(options, "nbest", 1))
            return CTCGenerator(decode, {self.dictionary.pad(), self.dictionary.eos()})
        limits = getattr(options, "max_len_a", 0), getattr(options, "max_len_b", 200)
        if str(self.cfg.vocab_type) == "char" and limits == (0, 200):
            options.max_len_a = _CHARACTERS_PER_FRAME
        generator = super().build_generator(models, options, seq_gen_cls, extra_gen_cls_kwargs, **kwargs)
        if self.cfg.ctc_rescore_weight == 0:
            return generator
        return CTCRescoringGenerator(generator, self.cfg.ctc_rescore_weight, self.dictionary.bos())

    def _check_decoding_options(self, ctc: bool) -> None:
        cfg = self.cfg
        if not ctc and (cfg.ctc_beam or cfg.ctc_lm):
            raise InputError("--ctc-beam and --ctc-lm are for CTC models; this one has a decoder: --beam, --lm-path")
        if cfg.ctc_lm and not cfg.ctc_beam:
            raise InputError("--ctc-lm works in the prefix beam search: add --ctc-beam, such as 16")
        for name in ("ctc_lm_weight", "ctc_word_bonus"):
            if not cfg.ctc_lm and getattr(cfg, name) != getattr(SpeechManifestConfig, name):
                raise InputError(f"--{name.replace('_', '-')} {getattr(cfg, name)} belongs to --ctc-lm")
        if ctc and cfg.ctc_rescore_weight:
            raise InputError("--ctc-rescore-weight is for encoder-decoders; this model is CTC alone")

    def _ctc_decoder(self, nbest: int) -> Decoder:
        blank = self.dictionary.bos()
        if not self.cfg.ctc_beam:
            logger.info("no decoder: CTC best-path decoding; --beam has no effect, --ctc-beam has")
            return partial(best_path, blank=blank)
        logger.info(f"no decoder: CTC prefix beam search, {self.cfg.ctc_beam} prefixes, n-gram {self.cfg.ctc_lm}")
        texts = [symbol.replace(self.tokenizer.word_boundary, " ") for symbol in self.dictionary.symbols]
        return PrefixBeamSearch(blank, self.cfg.ctc_beam, nbest, self._word_language_model, texts)

    @cached_property
    def _word_language_model(self) -> WordLanguageModel | None:
        cfg = self.cfg
        return WordLanguageModel(cfg.ctc_lm, cfg.ctc_lm_weight, cfg.ctc_word_bonus) if cfg.ctc_lm else None

    def build_bpe(self, args: FairseqDataclass | None) -> object:
        """Words of units, so that fairseq's ``D-`` and ``T-`` lines hold words by default."""
        if args is not None:
            return super().build_bpe(args)
        done = self.cfg.post_process is not None  # --post-process gives fairseq words already
        return _Words(None if done else self.tokenizer.post_process)

    def words(self, ids: Tensor, escape_unk: bool = False) -> list[str]:
        """The words that ids spell; ``escape_unk``, for references, lets no unknown symbol match another."""
        return self.dictionary.string(
            ids.int().cpu(),
            self.tokenizer.post_process,
            escape_unk=escape_unk,
            extra_symbols_to_ignore={self.dictionary.pad()},
        ).split()

    def train_step(
        self,
        sample: dict[str, Any],
        model: nn.Module,
        criterion: nn.Module,
        optimizer: FairseqOptimizer,
        update_num: int,
        ignore_grad: bool = False,
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """fairseq's step, on masked features from ``--specaugment-start-update`` on.

        Data-loader workers draw the masks, which travel with the batch; they are applied here, in the process that
        counts updates, so that the start does not depend on how many batches the workers are ahead.
        """
        if "masks" in sample and update_num >= self.cfg.specaugment_start_update:
            net_input = sample["net_input"]
            masked = apply_masks(net_input["src_tokens"], *sample["masks"])
            sample = sample | {"net_input": net_input | {"src_tokens": masked}}
        return super().train_step(sample, model, criterion, optimizer, update_num, ignore_grad)

    def valid_step(
        self, sample: dict[str, Any], model: nn.Module, criterion: nn.Module
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """The criterion's step; also logs the sums ``wer_errors`` and ``wer_words`` of the batch."""
        loss, sample_size, logging_output = super().valid_step(sample, model, criterion)
        if self.wer_generator is not None:
            hypotheses = self.inference_step(self.wer_generator, [model], sample)
            references = [self.words(target, escape_unk=True) for target in sample["target"]]
            decoded = [self.words(hypothesis[0]["tokens"]) for hypothesis in hypotheses]
            logging_output["wer_errors"] = sum(map(Levenshtein.distance, references, decoded))
            logging_output["wer_words"] = sum(map(len, references))
        return loss, sample_size, logging_output

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: nn.Module) -> None:
        """Log ``wer``, percent: word errors of the whole subset per word of its references."""
        if any("wer_words" in output for output in logging_outputs):
            for key in ("wer_errors", "wer_words"):
                metrics.log_scalar(f"_{key}", sum(output.get(key, 0) for output in logging_outputs))
            metrics.log_derived("wer", _word_error_rate)
        super().reduce_metrics(logging_outputs, criterion)


class _Words:
    """Joins printed units to words, in the form that fairseq expects of a bpe."""

    def __init__(self, method: str | None) -> None:
        self.method = method

    def encode(self, line: str) -> str:
        return line

    def decode(self, units: str) -> str:
        return " ".join(post_process(units, self.method).split())


def _word_error_rate(meters: Any) -> float:  # noqa: ANN401
    return round(100 * float(meters["_wer_errors"].sum) / max(float(meters["_wer_words"].sum), 1.0), 6)


def _some(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
