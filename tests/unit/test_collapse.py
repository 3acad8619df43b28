"""Collapse is found in trainings that collapse, named rightly, before the loss shows it, and in no others."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from speech_mt.diagnostics.collapse import ENTROPY_COLLAPSE, RANK_COLLAPSE, CollapseDetector
from speech_mt.diagnostics.monitor import Measured, Monitor
from speech_mt.modules.layers import EncoderLayer, LayerConfig

VOCABULARY, LENGTH, WIDTH = 20, 12, 32


@pytest.fixture(autouse=True)
def _one_thread():
    """The trainings are tiny: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Reverser(nn.Module):
    """Three encoder layers that learn to write a sequence backwards: attention has to look at one place."""

    def __init__(self, norm_placement):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH))
        cfg = LayerConfig(WIDTH, 2 * WIDTH, 4, 3, norm_placement=norm_placement)
        self.encoder = nn.Module()
        self.encoder.layers = nn.ModuleList(EncoderLayer(cfg) for _ in range(3))
        self.output = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions
        for layer in self.encoder.layers:
            x = layer(x)
        return self.output(x)


def train(norm_placement, lr, updates, patience=200):
    """Collapses, losses, and the last measurement, of a training that is measured at every fifth update."""
    torch.manual_seed(1)
    model, detector = Reverser(norm_placement), CollapseDetector(patience)
    monitor = Monitor(("entropy", "logits"), interval=5)
    optimizer = torch.optim.Adam(model.parameters(), lr, betas=(0.9, 0.98))
    monitor.attach(model)
    collapses, losses, last = [], [], None
    for update in range(1, updates + 1):
        tokens = torch.randint(VOCABULARY, (16, LENGTH))
        monitor.clock.set_num_updates(update - 1)
        with monitor.watch(model):
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(1).flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        optimizer.step()
        measured = monitor.reduce([monitor.statistics()])
        collapses += detector.update(update, loss.item(), norm, measured)
        monitor.wants_cosine = detector.wants_cosine
        losses.append(loss.item())
        last = measured or last
    return collapses, losses, last


def test_entropy_collapse_is_caught_before_the_loss_spikes():
    """Without LayerNorm, at a rate too high: it learns, then logits grow without end, and it blows up."""
    collapses, losses, _ = train("none", 0.03, 125)
    first, guessing = collapses[0], math.log(VOCABULARY)
    assert max(losses[80 : first.update]) < guessing  # nothing to be seen in the loss yet
    assert min(losses[first.update + 20 :]) > 3 * guessing  # soon there is
    assert (first.failure, first.kind) == (ENTROPY_COLLAPSE, "encoder")
    assert first.layers == (1, 2)
    assert first.head in range(4)
    assert {collapse.failure for collapse in collapses} == {ENTROPY_COLLAPSE}


def test_rank_collapse_of_a_post_ln_model():
    """At a rate too high it never learns more than how often each token comes."""
    collapses, losses, last = train("post", 0.03, 100, patience=60)
    assert [(c.failure, c.kind, c.layers[-1]) for c in collapses] == [(RANK_COLLAPSE, "encoder", 2)]
    assert losses[-1] == pytest.approx(math.log(VOCABULARY), rel=0.02)
    assert last.layers["cosine/encoder"][2] > 0.999  # measured because the detector wanted it


def test_sparse_attention_of_a_model_that_learns_is_no_collapse():
    """Entropy falls from 0.95 to below 0.1 of log(keys), logits rise twentyfold, and the task is solved."""
    collapses, losses, last = train("pre", 0.03, 120)
    assert last.layers["entropy_normalised/encoder"][0] < 0.1
    assert last.layers["max_logit/encoder"][0] > 40
    assert losses[-1] < 0.1
    assert collapses == []


def sparse(entropy, logit, heads=None):
    layers = {"entropy_normalised/cross": {0: 0.9, 1: entropy}, "max_logit/cross": {0: 2.0, 1: logit}}
    return Measured(layers=layers, heads=heads or {})


def alike(entropy=1.0, cosine=1.0, stack="encoder"):
    return Measured(
        layers={
            f"entropy_normalised/{stack}": {0: 0.8, 1: entropy, 2: entropy},
            f"cosine/{stack}": {0: 0.3, 1: cosine, 2: cosine},
        }
    )


def feed(detector, measurements, losses, norms=None, start=1):
    norms = norms or [1.0] * len(losses)
    found = []
    for update, (measured, loss, norm) in enumerate(zip(measurements, losses, norms, strict=True), start):
        found += detector.update(update, loss, norm, measured)
    return found


LEARNT = [8.0] * 10 + [4.0] * 50
FALLING = [sparse(0.9, 3.0)] * 40 + [sparse(0.05, 100.0)] * 20


@pytest.mark.parametrize(
    ("losses", "norms", "caught"),
    [
        ([4.0 - 0.05 * i for i in range(60)], [1.0] * 60, False),  # learns to look at one place
        (LEARNT, [1.0] * 45 + [50.0] + [1.0] * 14, False),  # one large gradient
        (LEARNT, [1.0] * 42 + [5.0] * 18, True),  # large gradients
        (LEARNT[:45] + [4.0 + 0.1 * i for i in range(15)], [1.0] * 60, True),  # the loss rises
        (LEARNT[:55] + [30.0] * 5, [1.0] * 60, True),  # the loss spikes
        (LEARNT[:55] + [-30.0] * 5, [1.0] * 60, False),  # so it does, downwards
        (LEARNT[:59] + [math.nan], [1.0] * 59 + [math.nan], True),
        ([5.0] * 10 + [4.0] * 50, [1.0] * 60, True),  # nothing is learnt
        ([8.0] * 10 + [4.0] * 50, [1.0] * 60, False),  # something was, and is kept
    ],
)
def test_a_sharp_fall_is_collapse_if_training_is_in_trouble(losses, norms, caught):
    found = feed(CollapseDetector(patience=30), FALLING, losses, norms)
    assert [(c.failure, c.kind, c.layers) for c in found] == [(ENTROPY_COLLAPSE, "cross", (1,))] * caught


@pytest.mark.parametrize(
    "measurements",
    [
        [sparse(0.03, 60.0)] * 60,  # sparse all along: a converged cross-attention
        [sparse(0.9, 3.0)] * 40 + [sparse(0.05, 6.0)] * 20,  # falls, and logits hardly rise
        [sparse(0.9, 3.0)] * 40 + [sparse(0.4, 100.0)] * 20,  # is not low
        [sparse(0.05, 100.0) if i % 8 == 7 else sparse(0.9, 3.0) for i in range(60)],  # one batch in eight
    ],
)
def test_trouble_of_another_cause_is_not_called_entropy_collapse(measurements):
    assert feed(CollapseDetector(), measurements, LEARNT, [1.0] * 42 + [5.0] * 18) == []


def test_an_episode_of_entropy_collapse_is_reported_once_and_can_come_again():
    detector, norms = CollapseDetector(), [1.0] * 42 + [5.0] * 18
    assert len(feed(detector, FALLING, LEARNT, norms)) == 1
    assert feed(detector, [sparse(0.9, 3.0)] * 300, [4.0] * 300, start=61) == []
    assert len(feed(detector, FALLING, [4.0] * 60, norms, start=361)) == 1


def test_the_warning_names_failure_kind_layer_head_update_and_evidence():
    heads = {"entropy_normalised/cross": torch.tensor([[0.9, 0.9], [0.08, 0.02]])}
    measurements = [*FALLING[:40], *[sparse(0.05, 100.0, heads)] * 20]
    (found,) = feed(CollapseDetector(), measurements, LEARNT, [1.0] * 42 + [5.0] * 18)
    assert str(found) == (
        "update 48: entropy collapse in cross layer 1, head 1 first: normalised entropy 0.05 (it was 0.9), largest "
        "logit 100 (it was 3), gradient norm 5 (it was 1)"
    )


def test_uniform_attention_to_like_tokens_is_collapse_only_when_the_loss_stands_still():
    detector = CollapseDetector(patience=50)
    assert feed(detector, [alike()] * 100, [5.0 - 0.02 * i for i in range(100)]) == []
    (found,) = feed(detector, [alike()] * 200, [3.0] * 200, start=101)
    assert (found.failure, found.kind, found.layers, found.head) == (RANK_COLLAPSE, "encoder", (1, 2), None)
    assert 100 < found.update <= 151
    assert "rank collapse in encoder layers 1-2: attention is uniform" in str(found)
    assert feed(detector, [alike(0.9, 0.5)] * 10, [3.0] * 10, start=301) == []  # over
    assert len(feed(detector, [alike()] * 60, [3.0] * 60, start=311)) == 1  # again


@pytest.mark.parametrize("measured", [alike(entropy=0.99), alike(cosine=0.99)])
def test_either_sign_alone_is_no_rank_collapse(measured):
    assert feed(CollapseDetector(patience=50), [measured] * 200, [3.0] * 200) == []


def test_a_stack_whose_last_layer_still_tells_tokens_apart_is_no_rank_collapse():
    measured = alike()
    measured.layers["cosine/encoder"][2] = measured.layers["entropy_normalised/encoder"][2] = 0.7
    assert feed(CollapseDetector(patience=50), [measured] * 200, [3.0] * 200) == []


def test_updates_that_were_not_measured_count_for_the_loss():
    detector = CollapseDetector(patience=50)
    measurements = [alike() if update % 10 == 0 else None for update in range(200)]
    assert len(feed(detector, measurements, [3.0] * 200)) == 1


def test_the_cosine_is_asked_for_while_attention_is_uniform():
    detector, wanted = CollapseDetector(patience=50), []
    without = Measured(layers={"entropy_normalised/encoder": {0: 0.8, 1: 1.0}})
    for measured in (sparse(0.5, 1.0), without, None, alike(), alike(entropy=0.9)):
        detector.update(1, 3.0, None, measured)
        wanted.append(detector.wants_cosine)
    assert wanted == [False, True, True, True, False]


def test_both_stacks_are_judged_apart():
    detector = CollapseDetector(patience=50)
    both = Measured(layers=alike().layers | alike(0.6, 0.2, "decoder").layers)
    assert [c.kind for c in feed(detector, [both] * 200, [3.0] * 200)] == ["encoder"]


def test_patience_is_a_number_of_updates():
    with pytest.raises(ValueError, match="at least 2, not 1"):
        CollapseDetector(patience=1)


def test_a_detector_goes_on_where_its_state_was_taken(tmp_path):
    """Saved in a checkpoint, which holds plain data alone, halfway through a series with a spike."""
    torch.manual_seed(0)
    losses = (3 + 0.1 * torch.rand(120)).tolist()
    losses[100] = 9.0

    def note(detector, update):
        layers = {"entropy_normalised/encoder": {0: 0.9, 1: 0.1}, "max_logit/encoder": {0: 3.0, 1: 50.0}}
        return detector.update(update, losses[update], 1.0, Measured(layers=layers))

    whole, first = CollapseDetector(patience=20), CollapseDetector(patience=20)
    for update in range(60):
        note(whole, update)
        note(first, update)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = CollapseDetector(patience=20)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for update in range(60, 120):
        assert note(second, update) == note(whole, update)
        assert second.loss_spiked(update) == whole.loss_spiked(update) == (update == 100)
    assert second.spikes.score == whole.spikes.score == 1 / 120
    assert second.state_dict() == whole.state_dict()
