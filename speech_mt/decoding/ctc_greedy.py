"""Best-path decoding of CTC models (Graves et al., 2006, section 3.2): in each frame the likeliest symbol,
repeats collapsed, blanks dropped."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from speech_mt.decoding.ctc_generator import Hypothesis


def best_path(log_probs: Tensor, lengths: Sequence[int], blank: int) -> list[list[Hypothesis]]:
    """The most probable alignment of each utterance, read off frame by frame.

    Args:
        log_probs: (batch, frames, symbols).
        lengths: frames of each utterance; later ones are padding.
        blank: id of the blank.

    Returns:
        For each utterance a list of one hypothesis as fairseq prints it: ``tokens``, int64 of shape (units,);
        ``score``, the alignment's log-probability per frame; ``positional_scores``, the mean log-probability over
        each token's frames; ``alignment``, pairs (first frame, unit); ``attention``, None.
    """
    best_scores, best_symbols = (values.cpu() for values in log_probs.max(dim=-1))
    return [
        [_collapse(symbols[:length], scores[:length].float(), blank)]
        for symbols, scores, length in zip(best_symbols, best_scores, lengths, strict=True)
    ]


def _collapse(symbols: Tensor, scores: Tensor, blank: int) -> Hypothesis:
    runs, run_of_frame, run_lengths = symbols.unique_consecutive(return_inverse=True, return_counts=True)
    run_scores = scores.new_zeros(len(runs)).index_add_(0, run_of_frame, scores) / run_lengths
    first_frames = run_lengths.cumsum(0) - run_lengths
    spoken = runs != blank
    return {
        "tokens": runs[spoken],
        "score": scores.mean().item() if len(scores) else 0.0,
        "positional_scores": run_scores[spoken],
        "alignment": list(zip(first_frames[spoken].tolist(), range(int(spoken.sum())), strict=True)),
        "attention": None,
    }
