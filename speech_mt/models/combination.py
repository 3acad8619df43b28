"""Which models, criterions and tasks go together; the others are refused before anything is trained or decoded."""

from __future__ import annotations

from collections.abc import Sequence

from fairseq.criterions import FairseqCriterion
from fairseq.criterions.ctc import CtcCriterion as StockCtcCriterion
from fairseq.criterions.label_smoothed_cross_entropy_with_ctc import LabelSmoothedCrossEntropyWithCtcCriterion
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY, FairseqEncoderDecoderModel
from fairseq.models.transformer import TransformerModelBase
from torch import nn

from speech_mt.criterions.ctc import CtcCriterion
from speech_mt.errors import InputError
from speech_mt.models.spectral import SpectralModel
from speech_mt.models.speech_ctc import SpectralCTCTransformer
from speech_mt.models.text_to_text import SpectralTransformer

TEXT_MODELS = (SpectralTransformer, TransformerModelBase)


def is_ctc(model: nn.Module) -> bool:
    """Whether it scores frames: an encoder without a decoder."""
    return not hasattr(model, "decoder")


def check_criterion(model: nn.Module, criterion: FairseqCriterion) -> None:
    """Look at a model and the loss that it is to be trained with; what is not known here is let through.

    Raises:
        InputError: they do not go together; the message names a criterion that does.
    """
    name, loss = type(model).__name__, type(criterion).__name__
    if isinstance(model, SpectralCTCTransformer) and not isinstance(criterion, CtcCriterion):
        stock = "; fairseq's ctc counts frames before subsampling" if isinstance(criterion, StockCtcCriterion) else ""
        raise InputError(f"{name} has no decoder: --criterion ctc_with_entropy trains it, not {loss}{stock}")
    if not isinstance(model, FairseqEncoderDecoderModel):
        return
    if isinstance(criterion, (CtcCriterion, StockCtcCriterion)):
        raise InputError(
            f"{name} has a decoder and {loss} trains an encoder alone: --criterion "
            "label_smoothed_cross_entropy_with_entropy trains it, for speech also ..._with_ctc_and_entropy"
        )
    if isinstance(criterion, LabelSmoothedCrossEntropyWithCtcCriterion):
        if not hasattr(model, "get_ctc_output"):
            raise InputError(f"{name} has no CTC head: {loss} is for speech, --arch spectral_s2t_transformer")
        if isinstance(model, SpectralModel) and model.encoder.ctc_proj is None:
            raise InputError(f"{loss} needs a CTC head on the encoder: give the model a --ctc-weight above 0 as well")


def check_reads_features(model_name: str, task_name: str) -> None:
    """Look at a model that a speech task is asked to build.

    Raises:
        InputError: it is one that reads text.
    """
    model = ARCH_MODEL_REGISTRY.get(model_name) or MODEL_REGISTRY.get(model_name)
    if model is not None and issubclass(model, TEXT_MODELS):
        raise InputError(
            f"{model_name} reads text, and --task {task_name} gives it speech: use spectral_s2t_transformer or "
            "spectral_ctc_transformer, or for text --task translation"
        )


def check_ensemble(models: Sequence[nn.Module], paths: Sequence[str]) -> None:
    """Look at models that are to decode together.

    Raises:
        InputError: only some of them have a decoder, or CTC models shorten their input differently.
    """
    kinds = ["CTC" if is_ctc(model) else "encoder-decoder" for model in models]
    if len(set(kinds)) > 1:
        found = ", ".join(f"{path} is {kind}" for path, kind in zip(paths, kinds, strict=True))
        raise InputError(f"an ensemble is of one kind of models: {found}")
    if set(kinds) == {"CTC"} and all(isinstance(model, SpectralModel) for model in models):
        factors = [model.encoder.subsample.stride for model in models]
        if len(set(factors)) > 1:
            found = ", ".join(f"{path} by {factor}" for path, factor in zip(paths, factors, strict=True))
            raise InputError(f"an ensemble of CTC models has to shorten its input alike: {found}")
