"""Audio files to plain text with a speech model, in batches, of any length."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from fairseq import utils
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from speech_mt.data.audio import conversions, read_audio
from speech_mt.data.features import FRAME_SHIFT_MS, log_mel_filterbank, normalize
from speech_mt.decoding.alignment import forced_alignment, word_spans
from speech_mt.decoding.ctc_generator import CTCGenerator, ctc_log_probs
from speech_mt.errors import InputError
from speech_mt.inference.long_audio import Chunk, cut_at_pauses, overlapping_chunks
from speech_mt.inference.search import search_options
from speech_mt.tasks.speech import SpeechManifestTask

FRAMES_PER_SECOND = 1000 / FRAME_SHIFT_MS


@dataclass(frozen=True)
class TimedWord:
    """A word and when it was said, in seconds."""

    word: str
    start: float
    end: float


@dataclass(frozen=True)
class Transcript:
    """What was said in a file.

    Attributes:
        file: its path as given.
        text: its words.
        seconds: its length.
        words: with their times, if asked for.
        notes: what was done to the audio: resampled, mixed down.
        error: why there is no text, or None.
    """

    file: str
    text: str = ""
    seconds: float = 0.0
    words: tuple[TimedWord, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None


class Transcriber:
    """A model of the task ``speech_manifest``, with a decoder or with CTC; made by :func:`speech_mt.load`."""

    def __init__(self, task: SpeechManifestTask, model: nn.Module, device: torch.device) -> None:
        self.task = task
        self.model = model
        self.device = device

    def transcribe(self, files: Sequence[str | os.PathLike[str]], **options: Any) -> list[str]:
        """The text of each file, in their order; options as for :meth:`transcripts`.

        Raises:
            InputError: a file that cannot be read; :meth:`transcripts` goes on after such.
        """
        texts = []
        for transcript in self.transcripts(files, **options):
            if transcript.error is not None:
                raise InputError(transcript.error)
            texts.append(transcript.text)
        return texts

    def transcripts(
        self,
        files: Sequence[str | os.PathLike[str]],
        *,
        word_timestamps: bool = False,
        chunk_seconds: float = 30.0,
        overlap_seconds: float = 4.0,
        batch_size: int = 8,
        **generation: Any,
    ) -> Iterator[Transcript]:
        """Transcribe each file, one after the other; a file that cannot be read gives a transcript with an ``error``.

        Files may be in any format and rate that soundfile reads; they are resampled, and channels averaged, as
        ``notes`` says. One longer than ``chunk_seconds``, or than the model takes, is cut up: for CTC into chunks
        that overlap, whose frames are joined before they are decoded; for attention, which has no frames to join, at
        the quietest moment of each chunk's last ``overlap_seconds``.

        Args:
            files: paths.
            word_timestamps: find each word's time (CTC models), by forced alignment of the transcript.
            batch_size: the most chunks in the model at once, and files in memory.
            generation: options of attention's beam search, named as in ``fairseq-generate``, such as ``beam`` (5).

        Raises:
            InputError: options that cannot be met.
        """
        if isinstance(files, str | os.PathLike):
            raise InputError(f"transcripts of a list of files; got one path: put {os.fspath(files)} into a list")
        generator = self.task.build_generator([self.model], search_options(generation))
        ctc = isinstance(generator, CTCGenerator)
        if word_timestamps and not ctc:
            raise InputError("word timestamps need a CTC model; this one has a decoder, whose words have no frames")
        if batch_size < 1:
            raise InputError(f"batch_size {batch_size}: has to be at least 1")
        frames = chunk_seconds * FRAMES_PER_SECOND
        if not (frames >= 1 and 0 <= overlap_seconds < math.inf):
            raise InputError(f"chunks of {chunk_seconds} s that overlap by {overlap_seconds} s: give positive seconds")
        size, overlap = int(min(frames, self._max_frames())), int(overlap_seconds * FRAMES_PER_SECOND)
        names = map(os.fspath, files)
        while group := list(itertools.islice(names, batch_size)):
            heard = [self._hear(name) for name in group]
            features = [features for _, features in heard if features is not None]
            if ctc:
                found = self._decode_frames(features, generator, size, overlap, batch_size, word_timestamps)
            else:
                found = self._decode_texts(features, generator, size, overlap, batch_size)
            for transcript, features in heard:
                yield transcript if features is None else self._complete(transcript, *next(found))

    def _max_frames(self) -> int:
        return utils.resolve_max_positions(self.task.max_positions(), self.model.max_positions())[0]

    def _hear(self, file: str) -> tuple[Transcript, Tensor | None]:
        """A transcript without text yet, and the features (frames, bins), not normalised."""
        config = self.task.features
        try:
            samples = read_audio(file, config.sample_rate, resample=True)
            features = log_mel_filterbank(samples, config.sample_rate, config.num_mel_bins)
        except InputError as error:
            message = str(error)
            return Transcript(file, error=message if file in message else f"{file}: {message}"), None
        notes = tuple(conversions(file, config.sample_rate))
        return Transcript(file, seconds=len(samples) / config.sample_rate, notes=notes), features

    def _decode_frames(
        self,
        features: list[Tensor],
        generator: CTCGenerator,
        size: int,
        overlap: int,
        batch_size: int,
        word_timestamps: bool,
    ) -> Iterator[tuple[Tensor, list[TimedWord]]]:
        """Token ids and timed words of each utterance: what is kept of all chunks' frames, decoded as one."""
        stride = self.model.encoder.subsample.stride
        plans = [overlapping_chunks(len(frames), size, overlap, stride) for frames in features]
        outputs = iter(self._run(features, plans, batch_size, self._frames))
        for chunks in plans:
            kept = []
            for chunk in chunks:
                first = (chunk.keep_start - chunk.start) // stride
                last = (chunk.keep_end - chunk.start) // stride if chunk.keep_end < chunk.end else None
                kept.append(next(outputs)[first:last])
            log_probs = torch.cat(kept)
            ((best, *_),) = generator.decode(log_probs[None], [len(log_probs)])
            yield best["tokens"], self._timed(log_probs, best["tokens"], stride) if word_timestamps else []

    def _timed(self, log_probs: Tensor, tokens: Tensor, stride: int) -> list[TimedWord]:
        spans = forced_alignment(log_probs, tokens, self.task.dictionary.bos())
        symbols = [self.task.dictionary[token] for token in tokens.tolist()]
        seconds = stride / FRAMES_PER_SECOND
        return [
            TimedWord(word.text, round(word.start * seconds, 3), round(word.end * seconds, 3))
            for word in word_spans(spans, symbols, self.task.tokenizer.word_boundary)
        ]

    def _decode_texts(
        self,
        features: list[Tensor],
        generator: Any,
        size: int,
        overlap: int,
        batch_size: int,  # noqa: ANN401
    ) -> Iterator[tuple[list[Tensor], list[TimedWord]]]:
        """The token ids of each utterance's chunks, in their order."""

        def decode(net_input: dict[str, Tensor]) -> list[Tensor]:
            lists = self.task.inference_step(generator, [self.model], {"net_input": net_input})
            return [hypotheses[0]["tokens"] for hypotheses in lists]

        plans = [cut_at_pauses(frames, size, min(overlap, size // 2)) for frames in features]
        outputs = iter(self._run(features, plans, batch_size, decode))
        for chunks in plans:
            yield list(itertools.islice(outputs, len(chunks))), []

    def _frames(self, net_input: dict[str, Tensor]) -> list[Tensor]:
        log_probs, lengths = ctc_log_probs([self.model], net_input)
        return [frames[:length] for frames, length in zip(log_probs.cpu(), lengths, strict=True)]

    @torch.no_grad()
    def _run(self, features: list[Tensor], plans: list[list[Chunk]], batch_size: int, step: Any) -> list[Any]:  # noqa: ANN401
        """``step`` of every chunk of every utterance, longest first in batches; the results in the chunks' order."""
        method = self.task.features.normalization
        chunks = [
            normalize(frames[chunk.start : chunk.end], method)
            for frames, plan in zip(features, plans, strict=True)
            for chunk in plan
        ]
        results: list[Any] = [None] * len(chunks)
        order = sorted(range(len(chunks)), key=lambda k: -len(chunks[k]))
        for first in range(0, len(order), batch_size):
            rows = order[first : first + batch_size]
            net_input = {
                "src_tokens": pad_sequence([chunks[row] for row in rows], batch_first=True).to(self.device),
                "src_lengths": torch.tensor([len(chunks[row]) for row in rows], device=self.device),
            }
            for row, result in zip(rows, step(net_input), strict=True):
                results[row] = result
        return results

    def _complete(
        self, transcript: Transcript, tokens: Tensor | Iterable[Tensor], words: list[TimedWord]
    ) -> Transcript:
        parts = [tokens] if isinstance(tokens, Tensor) else tokens
        text = " ".join(word for part in parts for word in self.task.words(part))
        return replace(transcript, text=text, words=tuple(words))
