"""A bidirectional text encoder: masked language modelling, then similarity of sentences and spans of answers.

    python examples/oversmoothing/text_encoder.py --control sharpen --out runs/text_encoder

Statements about who has how many ("anna has forty two , bob has seven") are written and binarised, and fairseq-train
learns to guess masked words. Then, as in STS-12, Spearman's correlation of cosines between the mean vectors of two
statements with a gold similarity, without training; and, as in SQuAD, the span that answers "how many has bob", exact
matches and F1 over words, after training a layer of two scores a word and the encoder under it.

The built-in gold similarity is the share of persons, and of digits of their numbers, that agree. Other sentences:
--pairs FILE, lines of score, sentence, sentence with tabs between.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from controls import CONTROLS
from torch import Tensor, nn

from speech_mt.data.numbers import number_words
from speech_mt.data.stage import atomic_path, run_stage
from speech_mt.errors import InputError, run
from speech_mt.experiments.commands import BIN, Progress, run_command

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("anna", "bob", "carla", "david", "emma", "felix", "greta", "hugo")
STATEMENTS = {"train": 6000, "valid": 200}
LENGTH = 96  # tokens, of a text with its question too


@dataclass(frozen=True)
class Statement:
    """Who has how many."""

    holdings: tuple[tuple[str, int], ...]

    def text(self) -> str:
        return " , ".join(f"{name} has {number_words(number, 'en')}" for name, number in self.holdings)


def draw_statement(source: random.Random) -> Statement:
    """One to three persons with numbers below 10,000."""
    names = source.sample(NAMES, source.randint(1, 3))
    return Statement(tuple((name, source.randrange(10 ** source.randint(1, 4))) for name in names))


def similarity(one: Statement, other: Statement) -> float:
    """0 to 5: for every person of either, 0 for one that the other lacks, else the mean of 1 and of the share of digits
    that agree, counted from the last."""
    holdings, others = dict(one.holdings), dict(other.holdings)
    names = holdings.keys() | others.keys()
    total = 0.0
    for name in holdings.keys() & others.keys():
        digits = [str(number)[::-1] for number in (holdings[name], others[name])]
        agree = sum(a == b for a, b in zip(*digits, strict=False)) / max(map(len, digits))
        total += (1 + agree) / 2
    return 5 * total / len(names)


def draw_pairs(count: int, seed: int) -> list[tuple[float, str, str]]:
    """Half of the pairs are a statement and one with a person left out, or with another number."""
    source, pairs = random.Random(seed), []
    for i in range(count):
        one = draw_statement(source)
        other = (
            draw_statement(source) if i % 2 else Statement((*one.holdings[:-1], *draw_statement(source).holdings[:1]))
        )
        pairs.append((similarity(one, other), one.text(), other.text()))
    return pairs


def read_pairs(path: Path) -> list[tuple[float, str, str]]:
    """Score, sentence, sentence.

    Raises:
        InputError: a line that is something else.
    """
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            score, one, other = line.split("\t")
            pairs.append((float(score), one, other))
        except ValueError:
            raise InputError(f"{path}, line {number}: not a score and two sentences with tabs between") from None
    return pairs


@dataclass(frozen=True)
class Question:
    """A text, a question about it, and the words of the text that answer it, first to last."""

    text: str
    question: str
    first: int
    last: int


def draw_questions(count: int, seed: int) -> list[Question]:
    source, questions = random.Random(seed), []
    for _ in range(count):
        statement = draw_statement(source)
        asked = source.randrange(len(statement.holdings))
        before = Statement(statement.holdings[:asked]).text().split()
        first = len(before) + (asked > 0) + 2  # the comma, the name and "has"
        words = number_words(statement.holdings[asked][1], "en").split()
        name = statement.holdings[asked][0]
        questions.append(Question(statement.text(), f"how many has {name}", first, first + len(words) - 1))
    return questions


def write_corpus(folder: Path) -> str:
    source = random.Random(0)
    for split, count in STATEMENTS.items():
        lines = [draw_statement(source).text() for _ in range(count)]
        lines += [f"how many has {source.choice(NAMES)}" for _ in range(count // 10)]
        with atomic_path(folder / f"{split}.txt") as temporary:
            temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return f"{sum(STATEMENTS.values()):,} statements"


def pretrain(args: argparse.Namespace, progress: Progress) -> Path:
    """The checkpoint of a masked language model."""
    data, folder = args.out / "data", args.out / re.sub(r"\W+", "_", args.control)
    run_stage(data, "statements", STATEMENTS, lambda: write_corpus(data))
    files = f"--trainpref {data}/train.txt --validpref {data}/valid.txt --destdir {data}/bin"
    binarise = shlex.split(f"fairseq-preprocess --only-source {files}")
    run_command(data, "preprocess", binarise, root=ROOT, progress=progress)
    command = (
        f"fairseq-train {data}/bin --user-dir user_dir --cpu --task masked_lm --criterion masked_lm "
        f"--arch spectral_masked_lm_tiny --encoder-layers {args.layers} {CONTROLS[args.control].options} "
        f"--tokens-per-sample {LENGTH} --sample-break-mode eos --dropout 0 --batch-size 64 --optimizer adam --lr 1e-3 "
        f"--weight-decay 0.01 --clip-norm 1.0 --lr-scheduler polynomial_decay --warmup-updates {args.updates // 10} "
        f"--total-num-update {args.updates} --max-update {args.updates} --seed {args.seed} --num-workers 0 "
        f"--log-format simple --log-interval 20 --no-epoch-checkpoints --save-dir {folder}"
    )
    run_command(folder, "train", shlex.split(command), root=ROOT, progress=progress)
    return folder / "checkpoint_last.pt"


class Sentences:
    """Texts as batches of token ids, ``<s> ... </s>``, padded on the right as the masked_lm task pads them."""

    def __init__(self, dictionary: object) -> None:
        self.dictionary = dictionary

    def batch(self, texts: Sequence[str]) -> Tensor:
        """(B, S)."""
        d = self.dictionary
        ids = [torch.cat([torch.tensor([d.bos()]), self._ids(text)]) for text in texts]
        return nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=d.pad())

    def _ids(self, text: str) -> Tensor:
        return self.dictionary.encode_line(text, add_if_not_exist=False, append_eos=True).long()


@torch.no_grad()
def spearman(model: nn.Module, sentences: Sentences, pairs: Sequence[tuple[float, str, str]]) -> float:
    """Percent: of the cosines with the scores."""
    from scipy.stats import spearmanr

    model.eval()
    scores, ones, others = zip(*pairs, strict=True)
    vectors = [model.sentence_vectors(sentences.batch(side)) for side in (ones, others)]
    return 100 * float(spearmanr(F.cosine_similarity(*vectors).numpy(), scores).statistic)


class SpanReader(nn.Module):
    """Two scores a token: that the answer begins there, that it ends there (BERT, arXiv 1810.04805, section 4.2)."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder
        self.scores = nn.Linear(encoder.encoder.embed_tokens.embedding_dim, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) ids -> (2, B, S) log-probabilities."""
        x, valid = self.encoder.features(tokens)
        return self.scores(x).masked_fill(~valid.unsqueeze(-1), -torch.inf).permute(2, 0, 1).log_softmax(-1)


def train_reader(
    reader: SpanReader, sentences: Sentences, questions: Sequence[Question], updates: int, seed: int
) -> None:
    optimizer = torch.optim.Adam(reader.parameters(), 5e-4)
    order = np.random.default_rng(seed)
    reader.train()
    for update in range(updates):
        reader.encoder.set_num_updates(10**6 + update)
        chosen = [questions[i] for i in order.choice(len(questions), 32, replace=False)]
        log_probs = reader(sentences.batch([f"{q.text} . {q.question}" for q in chosen]))
        spans = torch.tensor([[q.first + 1 for q in chosen], [q.last + 1 for q in chosen]])  # after <s>
        optimizer.zero_grad()
        F.nll_loss(log_probs.flatten(0, 1), spans.flatten()).backward()
        optimizer.step()


@torch.no_grad()
def read_answers(reader: SpanReader, sentences: Sentences, questions: Sequence[Question]) -> tuple[float, float]:
    """Percent of exact matches, and mean F1 over words, of the likeliest spans."""
    reader.eval()
    first, last = reader(sentences.batch([f"{q.text} . {q.question}" for q in questions]))
    spans = first.unsqueeze(2) + last.unsqueeze(1)
    later = torch.ones(spans.shape[1:], dtype=torch.bool).triu()
    best = spans.masked_fill(~later, -torch.inf).flatten(1).argmax(1)
    exact, f1 = [], []
    for question, index in zip(questions, best.tolist(), strict=True):
        start, end = divmod(index, spans.shape[-1])
        words = ["<s>", *f"{question.text} . {question.question}".split(), "</s>"]
        found, true = words[start : end + 1], words[question.first + 1 : question.last + 2]
        exact.append(found == true)
        f1.append(2 * (Counter(found) & Counter(true)).total() / (len(found) + len(true)))
    return 100 * float(np.mean(exact)), 100 * float(np.mean(f1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "text_encoder")
    parser.add_argument("--control", choices=list(CONTROLS), default="stock", metavar="NAME", help=", ".join(CONTROLS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--updates", type=int, default=400, help="of the masked language model")
    parser.add_argument("--reader-updates", type=int, default=150, help="of the span reader")
    parser.add_argument("--pairs", type=Path, help="score, sentence, sentence with tabs between, instead of our own")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    args.out = Path(os.path.relpath(args.out.absolute(), ROOT))
    os.chdir(ROOT)
    os.environ["PATH"] = f"{BIN}:{os.environ['PATH']}"
    checkpoint = pretrain(args, Progress())

    from fairseq.checkpoint_utils import load_model_ensemble_and_task
    from fairseq.utils import import_user_module

    import_user_module(argparse.Namespace(user_dir="user_dir"))
    (model,), _, task = load_model_ensemble_and_task([str(checkpoint)])
    sentences = Sentences(task.source_dictionary)
    torch.manual_seed(args.seed)
    pairs = draw_pairs(400, 1) if args.pairs is None else read_pairs(args.pairs)
    correlation = spearman(model, sentences, pairs)
    reader = SpanReader(model)
    train_reader(reader, sentences, draw_questions(4000, 2), args.reader_updates, args.seed)
    exact, f1 = read_answers(reader, sentences, draw_questions(300, 3))
    print(
        f"{args.control}, {args.layers}L: Spearman {correlation:.1f} ({len(pairs)} pairs), "
        f"exact match {exact:.1f}, F1 {f1:.1f} (300 questions)"
    )


if __name__ == "__main__":
    run(main)
