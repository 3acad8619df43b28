"""Options of the task ``speech_manifest``."""

# fairseq reads the types of the fields: no "from __future__ import annotations" here

from dataclasses import dataclass, field
from typing import Optional

from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from omegaconf import II, MISSING

from speech_mt.data.features import NORMALIZATIONS, FeatureConfig
from speech_mt.data.specaugment import POLICIES
from speech_mt.ranges import COUNT, FINITE, NOT_NEGATIVE, Range

RANGES = {
    **dict.fromkeys(("sample_rate", "num_mel_bins", "max_source_positions", "max_target_positions"), COUNT),
    **dict.fromkeys(("ctc_subsampling", "ctc_beam", "ctc_lm_weight"), NOT_NEGATIVE),
    "ctc_word_bonus": FINITE,
    "ctc_rescore_weight": Range(0, 1),
}


@dataclass
class SpeechManifestConfig(FairseqDataclass):
    """Options of the task; see each one's help."""

    data: str = field(
        default=MISSING,
        metadata={
            "help": "folder with train.tsv, valid.tsv, ..., dict.txt and, for sentencepiece, spm.model"
        },
    )
    vocab_type: ChoiceEnum(["char", "sentencepiece"]) = field(
        default="char",
        metadata={"help": "target units: characters with | between words, or the pieces of spm.model"},
    )
    lowercase: bool = field(default=False, metadata={"help": "lower-case the transcripts"})
    sample_rate: int = field(default=FeatureConfig.sample_rate, metadata={"help": "of the audio, Hz"})
    resample: bool = field(
        default=FeatureConfig.resample,
        metadata={"help": "convert audio of another sample rate instead of stopping"},
    )
    num_mel_bins: int = field(
        default=FeatureConfig.num_mel_bins, metadata={"help": "log-mel filterbanks per frame of 10 ms"}
    )
    features_normalization: ChoiceEnum(NORMALIZATIONS) = field(
        default=FeatureConfig.normalization,
        metadata={
            "help": "zero mean and unit variance over each whole utterance (utterance), over its frames for "
            "each filterbank (per_bin), or not at all (none)"
        },
    )
    specaugment: ChoiceEnum(list(POLICIES)) = field(
        default="none", metadata={"help": "SpecAugment policy in training; see speech_mt/data/specaugment.py"}
    )
    specaugment_start_update: int = field(
        default=0, metadata={"help": "SpecAugment begins at this update; 0: at once"}
    )
    speed_perturb: str = field(
        default="",
        metadata={"help": "in training, play each utterance at one of these speeds, such as 0.9,1.0,1.1"},
    )
    max_source_positions: int = field(default=6000, metadata={"help": "most frames of an utterance"})
    max_target_positions: int = field(
        default=1024, metadata={"help": "most target units, the end of sentence counted"}
    )
    ctc_subsampling: int = field(
        default=0,
        metadata={
            "help": "for CTC: the factor by which the model shortens its input; training utterances left "
            "with fewer frames than CTC needs are then dropped, with a report. 0: no check"
        },
    )
    eval_wer: bool = field(
        default=False,
        metadata={
            "help": "encoder-decoders: decode greedily in validation and report wer (CTC models always do)"
        },
    )
    ctc_beam: int = field(
        default=0, metadata={"help": "CTC models: prefix beam search with so many prefixes. 0: best path"}
    )
    ctc_lm: Optional[str] = field(  # noqa: UP045 (what fairseq can read)
        default=None,
        metadata={"help": "word n-gram for the prefix beam search: an ARPA file, or KenLM's binary form of it"},
    )
    ctc_lm_weight: float = field(default=0.5, metadata={"help": "of the n-gram's log-probability"})
    ctc_word_bonus: float = field(
        default=0.0, metadata={"help": "added for each word, in nats: the n-gram prefers fewer"}
    )
    ctc_rescore_weight: float = field(
        default=0.0,
        metadata={
            "help": "encoder-decoders with a CTC head: choose among the hypotheses of the beam by "
            "(1 - weight) attention + weight CTC. 0: attention alone"
        },
    )
    seed: int = II("common.seed")
    train_subset: str = II("dataset.train_subset")
    post_process: Optional[str] = II("common_eval.post_process")  # noqa: UP045 (what fairseq can read)
