"""examples/wmt_en_de/plan.py: its formulas are what models of this plugin are, keep and compute."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from speech_mt.models.config import SpectralTransformerConfig
from speech_mt.models.text_to_text import SpectralTransformer

EXAMPLE = Path(__file__).parents[2] / "examples" / "wmt_en_de"
spec = importlib.util.spec_from_file_location("wmt_en_de_plan", EXAMPLE / "plan.py")
plan = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(plan)
Batch, Shape, saved_bytes, update_flops = plan.Batch, plan.Shape, plan.saved_bytes, plan.update_flops

SENTENCES, LENGTH = 6, 20
BATCH = Batch(SENTENCES * LENGTH, SENTENCES * LENGTH, LENGTH)
SHAPES = [
    Shape(2, 32, 64, 4, 44, dropout=False),
    Shape(3, 48, 32, 2, 44),
    Shape(2, 32, 64, 4, 44, activation_dropout=True),
    Shape(2, 32, 64, 4, 44, reparam=True),
]


def build(shape, dictionary):
    """The model of a shape, in training mode."""
    cfg = SpectralTransformerConfig(
        encoder_layers=shape.layers,
        decoder_layers=shape.layers,
        encoder_embed_dim=shape.dim,
        encoder_ffn_embed_dim=shape.ffn,
        encoder_attention_heads=shape.heads,
        share_all_embeddings=True,
        dropout=0.1 * shape.dropout,
        activation_dropout=0.1 * shape.activation_dropout,
        reparam="sigma" if shape.reparam else "none",
        checkpoint_activations=shape.recompute,
        max_source_positions=100,
        max_target_positions=100,
    )
    task = SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)
    model = SpectralTransformer.build_model(cfg, task).train()
    model.set_num_updates(1)
    return model


def inputs():
    torch.manual_seed(0)
    source, target = (torch.randint(4, 44, (SENTENCES, LENGTH)) for _ in range(2))
    return source, torch.full((SENTENCES,), LENGTH), target


def loss(model):
    source, lengths, target = inputs()
    scores = model(source, lengths, target)[0]
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=1)


def kept_bytes(model):
    """Of the tensors that autograd saves, each storage once, without the model's own."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage  # held, so that no other gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss(model)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_model(shape, dictionary):
    model = build(shape, dictionary)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("shape", SHAPES)
def test_saved_bytes_are_what_autograd_keeps(shape, dictionary):
    kept = kept_bytes(build(shape, dictionary))
    assert saved_bytes(shape, BATCH, element=4, mask=4) == pytest.approx(kept, rel=0.002)


def test_recomputation_keeps_the_input_of_each_layer(dictionary):
    shapes = [Shape(layers, 32, 64, 4, 44, dropout=False, recompute=True) for layers in (2, 4)]
    kept = [kept_bytes(build(shape, dictionary)) for shape in shapes]
    planned = [saved_bytes(shape, BATCH, element=4, mask=4) for shape in shapes]
    assert planned[1] - planned[0] == kept[1] - kept[0]


@pytest.mark.parametrize("recompute", [False, True])
def test_operations_are_those_that_torch_counts(dictionary, recompute):
    """Of the linear maps: torch does not count attention on a CPU as the fused kernel computes it."""
    shape = Shape(2, 32, 64, 4, 44, recompute=recompute)
    model = build(shape, dictionary)
    with FlopCounterMode(display=False) as counter:
        loss(model).backward()
    counts = counter.get_flop_counts()["Global"]
    linear = sum(count for op, count in counts.items() if "attention" not in str(op) and "bmm" not in str(op))
    assert linear == update_flops(shape, Batch(BATCH.source, BATCH.target, 0))


def test_the_script_prints_a_row_a_depth_and_refuses_in_one_line():
    def script(*options):
        return subprocess.run(
            [sys.executable, str(EXAMPLE / "plan.py"), *options], capture_output=True, text=True, check=False
        )

    done = script("--depths", "6", "100", "--utilisation", "0.5")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:4]] == ["6L", "100L"]
    assert script("--gpus", "3").stderr.startswith("error: 32,768 tokens are no multiple of 4,096 on 3 GPUs")
    assert "--depths: '0' is not a whole number of at least 1" in script("--depths", "0").stderr
    assert "--peak: '0' is not a number of at least 1" in script("--peak", "0").stderr
    assert "invalid choice: 'sigam_reparam'" in script("--method", "sigam_reparam").stderr
    assert script("--utilisation", "30").stderr.startswith("error: --utilisation 30.0: a share")
