"""Utterances of a manifest as fairseq batches of features and targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset
from fairseq.data.data_utils import collate_tokens
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from speech_mt.data.feature_cache import cached_log_mel, has_cache
from speech_mt.data.features import FRAME_LENGTH_MS, FeatureConfig, frame_count, normalize, utterance_log_mel
from speech_mt.data.manifest import Manifest
from speech_mt.data.specaugment import SpecAugment, mask_generator
from speech_mt.data.speed import SpeedPerturbation
from speech_mt.data.transcripts import TargetSizes, Tokenizer, target_sizes, too_short_for_ctc
from speech_mt.errors import InputError

TOO_SHORT = f"less audio than one window of {FRAME_LENGTH_MS:.0f} ms"


class SpeechDataset(FairseqDataset):
    """Features and target ids of each row of a manifest, read when asked for.

    Lengths come from the manifest, so that batches are planned without opening any audio.

    Attributes:
        frames: feature frames of each utterance in the present epoch, int64 of shape (rows,).
        targets: :class:`TargetSizes` of all transcripts.
        training: whether to shuffle, to mask, and to leave out what cannot be learned from.
    """

    def __init__(
        self,
        manifest: Manifest,
        features: FeatureConfig,
        tokenizer: Tokenizer,
        *,
        pad: int,
        eos: int,
        training: bool = False,
        specaugment: SpecAugment | None = None,
        speed_perturbation: SpeedPerturbation | None = None,
        seed: int = 1,
        ctc_subsampling: int = 0,
        allow_nonfinite: bool = False,
    ) -> None:
        """``pad`` and ``eos`` are ids of the dictionary; the others are those of the task's options.

        Raises:
            InputError: other speeds are asked for of cached features, which need the audio.
        """
        self.manifest = manifest
        self.features = features
        self.tokenizer = tokenizer
        self.pad = pad
        self.eos = eos
        self.training = training
        self.specaugment = specaugment
        self.speed_perturbation = speed_perturbation if training else None
        if self.speed_perturbation is not None and has_cache(manifest):
            raise InputError(
                f"{manifest.path} has cached features and --speed-perturb needs the audio: take the columns "
                "features, offset and frames out of the manifest"
            )
        self.seed = seed
        self.ctc_subsampling = ctc_subsampling
        self.allow_nonfinite = allow_nonfinite
        # data-loader workers outlive an epoch, with a copy of this object: shared memory tells them the epoch
        self._epoch = torch.ones((), dtype=torch.int64).share_memory_()
        self._speeds: tuple[int, np.ndarray] | None = None  # epoch and every utterance's speed in it
        self.frames = self._planned_frames()
        self.targets: TargetSizes = target_sizes(manifest.column("text"), tokenizer)

    def _planned_frames(self) -> np.ndarray:
        if has_cache(self.manifest):
            return self.manifest.numbers("frames").astype(np.int64)
        seconds = self.manifest.duration
        if self.speed_perturbation is not None:
            seconds = seconds / self.speeds()
        samples = np.rint(seconds * self.features.sample_rate).astype(np.int64)
        return frame_count(samples, self.features.sample_rate)

    def speeds(self) -> np.ndarray:
        """The speed of every utterance in the present epoch, float64 of shape (rows,)."""
        epoch = int(self._epoch)
        if self._speeds is None or self._speeds[0] != epoch:
            self._speeds = epoch, self.speed_perturbation.of_epoch(self.seed, epoch, len(self))
        return self._speeds[1]

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """``id`` (the row), ``source`` float32 (frames, bins), ``target`` int64 (units + 1,), which ends in eos,
        and in training with SpecAugment the ``masks`` bool (frames,) and (bins,), which are not applied.

        Raises:
            InputError: naming the utterance whose audio or cached features cannot be used.
        """
        source = normalize(self._log_mel(index), self.features.normalization)
        ids, _ = self.tokenizer.encode([self.manifest.field(index, "text")])
        sample = {
            "id": index,
            "source": source,
            "target": torch.from_numpy(np.append(ids, self.eos).astype(np.int64)),
        }
        if self.training and self.specaugment is not None:
            sample["masks"] = self.specaugment.masks(
                *source.shape, mask_generator(self.seed, int(self._epoch), index)
            )
        return sample

    def _log_mel(self, index: int) -> Tensor:
        if not has_cache(self.manifest):
            speed = 1.0 if self.speed_perturbation is None else float(self.speeds()[index])
            return utterance_log_mel(self.manifest, index, self.features, speed)
        features = cached_log_mel(
            self.manifest, index, self.features.num_mel_bins, self.features.sample_rate
        )
        if not self.allow_nonfinite and not features.isfinite().all():
            raise InputError(
                f"{self.manifest.where(index)}: its cached features are not finite; extract them again"
            )
        return features

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch in the order of ``samples``; ``{}`` for none.

        ``net_input`` holds ``src_tokens`` float32 (batch, frames, bins), padded with 0, ``src_lengths``
        (batch,) in frames and ``prev_output_tokens`` (batch, units + 1), which starts with eos. ``target``
        (batch, units + 1) ends in eos and is padded; ``target_lengths`` (batch,) does not count the eos, as
        CTC wants it, ``ntokens`` does, as cross-entropy wants it. ``masks``, where samples have them, are bool of shape
        (batch, frames) and (batch, bins).
        """
        if not samples:
            return {}
        targets = [sample["target"] for sample in samples]
        sources = [sample["source"] for sample in samples]
        previous = collate_tokens(targets, self.pad, self.eos, move_eos_to_beginning=True)
        batch = {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "nsentences": len(samples),
            "ntokens": sum(len(target) for target in targets),
            "net_input": {
                "src_tokens": pad_sequence(sources, batch_first=True),
                "src_lengths": torch.tensor([len(source) for source in sources]),
                "prev_output_tokens": previous,
            },
            "target": collate_tokens(targets, self.pad),
            "target_lengths": torch.tensor([len(target) - 1 for target in targets]),
        }
        if "masks" in samples[0]:
            times, freqs = zip(*(sample["masks"] for sample in samples), strict=True)
            batch["masks"] = pad_sequence(times, batch_first=True), torch.stack(freqs)
        return batch

    @property
    def sizes(self) -> np.ndarray:
        """Frames and target ids, eos counted, int64 of shape (rows, 2)."""
        return np.stack([self.frames, self.targets.units.astype(np.int64) + 1], axis=1)

    def size(self, index: int) -> tuple[int, int]:
        """Frames and target ids of an utterance, eos counted."""
        return int(self.frames[index]), int(self.targets.units[index]) + 1

    def num_tokens(self, index: int) -> int:
        """What ``--max-tokens`` counts: frames."""
        return int(self.frames[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        """Frames of several utterances."""
        return self.frames[indices]

    def ordered_indices(self) -> np.ndarray:
        """Longest first, so that utterances of a length share a batch; in training, ties by seed and epoch."""
        order = np.arange(len(self))
        if self.training:
            order = np.random.default_rng((self.seed, int(self._epoch))).permutation(order)
        return order[np.argsort(-self.frames[order], kind="stable")]

    @property
    def can_reuse_epoch_itr_across_epochs(self) -> bool:
        """Training batches are made anew each epoch, so that a resumed run makes those of the uninterrupted one."""
        return not self.training

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order, speeds and masks, also in running data-loader workers."""
        self._epoch.fill_(epoch)
        if self.speed_perturbation is not None:
            self.frames = self._planned_frames()

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[np.ndarray]:
        """fairseq's batches; :class:`InputError` for an utterance that alone exceeds ``max_tokens``."""
        if max_tokens is not None and (self.frames[indices] > max_tokens).any():
            longest = indices[np.argmax(self.frames[indices])]
            raise InputError(
                f"{self.manifest.where(longest)} has {self.frames[longest]} frames, a batch may hold "
                f"{max_tokens}; set --max-tokens (--max-tokens-valid when training) to at least as many"
            )
        return super().batch_by_size(indices, max_tokens, max_sentences, required_batch_size_multiple)

    def exclusions(
        self, indices: np.ndarray, max_positions: tuple[int | None, int | None]
    ) -> dict[str, np.ndarray]:
        """The utterances that cannot be used, by reason; each is under its first reason only.

        Args:
            indices: rows to look at.
            max_positions: most frames and most target ids; None is no limit.
        """
        targets = self.targets
        max_frames, max_units = (np.inf if limit is None else limit for limit in max_positions)
        reasons = [
            (self.frames < 1, TOO_SHORT),
            (self.frames > max_frames, f"more than {max_frames} frames"),
            (
                targets.units + 1 > max_units,
                f"more than {max_units} target units, the end of sentence counted",
            ),
        ]
        if self.training:
            reasons.append((targets.units == 0, "no transcript"))
            short = too_short_for_ctc(self.frames, targets, self.ctc_subsampling)
            reasons.append((short, "fewer encoder frames than CTC needs"))
        remaining = np.asarray(indices)
        excluded = {}
        for applies, reason in reasons:
            hit = applies[remaining]
            if hit.any():
                excluded[reason] = remaining[hit]
                remaining = remaining[~hit]
        return excluded

    def filter_indices_by_size(
        self, indices: np.ndarray, max_sizes: tuple[int | None, int | None]
    ) -> tuple[np.ndarray, list[int]]:
        """Split ``indices`` into those to use, in their order, and those of :meth:`exclusions`."""
        excluded = [row for rows in self.exclusions(indices, max_sizes).values() for row in rows.tolist()]
        return indices[~np.isin(indices, excluded)], excluded
