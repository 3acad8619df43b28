"""BLEU of models that have not learned anything yet: fairseq's C code reads the first token of no tokens."""

from __future__ import annotations

from torch import Tensor


def empty_hypothesis_crashes() -> bool:
    from fairseq.scoring.bleu import Scorer

    return Scorer.add.__module__ == Scorer.__module__


def score_empty_hypotheses() -> None:
    from fairseq.scoring.bleu import Scorer

    stock_add, stock_brevity = Scorer.add, Scorer.brevity

    def add(self: Scorer, ref: Tensor, pred: Tensor) -> None:
        if ref.numel() and pred.numel():
            stock_add(self, ref, pred)
            return
        reference, hypothesis = (int((t.ne(self.pad) & t.ne(self.eos)).sum()) for t in (ref, pred))
        self.stat.reflen += reference
        self.stat.predlen += hypothesis
        for order in range(1, 5):
            count = f"count{order}"
            setattr(self.stat, count, getattr(self.stat, count) + max(0, hypothesis - order + 1))

    def brevity(self: Scorer) -> float:
        return stock_brevity(self) if self.stat.predlen else 0.0

    Scorer.add, Scorer.brevity = add, brevity
