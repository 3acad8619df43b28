"""z-loss: a small pull of the output's normaliser towards 1, against the drift of output logits.

    loss + w * log^2 Z,  Z = sum_v exp(logit_v), for every predicted token

PaLM (arXiv 2204.02311, section 5) with w = 1e-4; studied for stability in arXiv 2309.14322.
"""

from torch import Tensor


def z_loss(logits: Tensor, counted: Tensor) -> Tensor:
    """log^2 Z of each position, 0 where it does not count.

    Args:
        logits: (..., V).
        counted: (...) bool.

    Returns:
        (...) float32.
    """
    return logits.float().logsumexp(-1).square().masked_fill(~counted, 0.0)
