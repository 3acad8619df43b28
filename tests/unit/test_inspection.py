"""A checkpoint's layers in numbers equal torch's own on the matrices; what is planted is found and nothing else."""

import importlib.util
import json
import math
import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from speech_mt.checkpoint import save_checkpoint
from speech_mt.diagnostics.inspection import LayerNumbers, add_data, inspect_weights, model_options
from speech_mt.diagnostics.monitor import Measured, Monitor
from speech_mt.diagnostics.worries import find_worries
from speech_mt.errors import InputError
from speech_mt.modules.layers import DecoderLayer, EncoderLayer, LayerConfig
from speech_mt.plotting.checkpoint_figure import make_checkpoint_figure
from speech_mt.reparam import sigma_reparam, states

from .conftest import SIZES

OPTIONS = {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "reparam": "sigma"}


class Transformer(nn.Module):
    """Six layers a stack, of widths 16 and 16, without fairseq: 4 heads in the encoder, 2 in the decoder."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(1)
        self.encoder, self.decoder = nn.Module(), nn.Module()
        encoder, decoder = (LayerConfig(16, 32, heads, 6, 6, **options) for heads in (4, 2))
        self.encoder.layers = nn.ModuleList(EncoderLayer(encoder) for _ in range(6))
        self.decoder.layers = nn.ModuleList(DecoderLayer(decoder) for _ in range(6))


def inspect(model, **options):
    return {row.name: row for row in inspect_weights(model.state_dict(), OPTIONS | options)}


# -- numbers ------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_numbers_of_a_layer_are_those_of_its_matrices():
    model = Transformer()
    rows = inspect(model)
    assert [row.kind for row in rows.values()] == ["encoder"] * 6 + ["decoder"] * 6 + ["cross"] * 6
    for row, heads in ((rows["encoder.layers.2"], 4), (rows["decoder.layers.2"], 2)):
        layer = model.get_submodule(row.name)
        attention, size = layer.self_attn, 16 // heads
        for name, norm in row.spectral_norms.items():
            module = layer if name.startswith("fc") else attention
            expected = torch.linalg.matrix_norm(module.get_submodule(name).weight, 2).item()
            assert norm == pytest.approx(expected, rel=0.01)
        q, k = (projection.weight.double().view(heads, size, 16) for projection in (attention.q_proj, attention.k_proj))
        bias = attention.q_proj.bias.double().view(heads, size)
        products = torch.stack([torch.cat([q[h], bias[h, :, None]], 1).T @ k[h] for h in range(heads)])
        expected = torch.linalg.matrix_norm(products, 2)
        torch.testing.assert_close(torch.tensor(row.per_head["query_key_norm"]).double(), expected, rtol=1e-4, atol=0)
        deviation = torch.linalg.matrix_norm(products) / size**0.5
        torch.testing.assert_close(torch.tensor(row.per_head["typical_logit"]).double(), deviation, rtol=1e-4, atol=0)

        value, output = attention.v_proj.weight.double(), attention.out_proj.weight.double()
        per_head = [value[h * size : (h + 1) * size].T @ output[:, h * size : (h + 1) * size].T for h in range(heads)]
        eigenvalues = torch.linalg.eigvals(torch.stack(per_head))
        nonzero = eigenvalues[eigenvalues.abs() > 1e-9]
        assert len(nonzero) == 16
        assert row.numbers["positive_share"] == (nonzero.real > 0).double().mean().item()
        assert row.numbers["lowest_real"] == pytest.approx(nonzero.real.min().item(), rel=1e-4)
        assert row.numbers["highest_real"] == pytest.approx(nonzero.real.max().item(), rel=1e-4)
        assert row.numbers["largest_modulus"] == pytest.approx(nonzero.abs().max().item(), rel=1e-4)
        singular_values = torch.linalg.svdvals(sum(per_head))
        condition_number = (singular_values[0] / singular_values[-1]).item()
        assert row.numbers["condition_number"] == pytest.approx(condition_number, rel=0.01)


def test_typical_logit_is_the_deviation_of_logits_between_random_tokens():
    model = Transformer()
    attention = model.encoder.layers[0].self_attn
    nn.init.zeros_(attention.q_proj.bias)
    row = inspect(model)["encoder.layers.0"]
    with torch.no_grad():
        q, k = (attention._heads(p(torch.randn(1, 3000, 16))) for p in (attention.q_proj, attention.k_proj))
        logits = (q - attention.q_proj.bias.view(1, 4, 1, 4)) @ (k - attention.k_proj.bias.view(1, 4, 1, 4)).mT
    deviations = (logits * attention.scale).std(dim=(0, 2, 3))
    torch.testing.assert_close(torch.tensor(row.per_head["typical_logit"]), deviations, rtol=0.05, atol=0)


def test_cross_attention_has_no_h_whose_eigenvalues_could_mean_anything():
    row = inspect(Transformer())["decoder.layers.0.encoder_attn"]
    assert list(row.spectral_norms) == ["k_proj", "v_proj", "q_proj", "out_proj"]
    assert row.numbers == {}
    assert len(row.per_head["query_key_norm"]) == 2


@torch.no_grad()
def test_h_of_a_pre_norm_layer_has_the_gain_of_its_layer_norm():
    model = Transformer(norm_placement="pre")
    attention = model.encoder.layers[0].self_attn
    attention.v_proj.weight.copy_(torch.eye(16))
    attention.out_proj.weight.copy_(torch.eye(16))
    gain = torch.arange(1.0, 17) * torch.tensor([-1.0, 1, 1, 1]).repeat(4)
    model.encoder.layers[0].self_attn_layer_norm.weight.copy_(gain)
    stock = {"encoder_normalize_before": True, "decoder_normalize_before": True}
    for options in ({"norm_placement": "pre"}, stock):
        numbers = inspect(model, **options)["encoder.layers.0"].numbers
        assert (numbers["positive_share"], numbers["lowest_real"], numbers["highest_real"]) == (0.75, -13, 16)
        assert numbers["condition_number"] == pytest.approx(16)
    assert inspect(model, norm_placement="post")["encoder.layers.0"].numbers["lowest_real"] == 1


@torch.no_grad()
@pytest.mark.parametrize("positive", [False, True])
def test_under_sigma_reparam_norms_are_the_moduli_of_gamma(positive):
    model = Transformer()
    sigma_reparam(model, positive_gamma=positive)
    gammas = torch.linspace(-2, 2, 6)
    for _, state in states(model):
        state.reestimate(svd=True)
        state.gamma[:6] = gammas
    row = inspect(model, reparam_positive_gamma=positive)["encoder.layers.4"]
    names = ["k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"]
    expected = nn.functional.softplus(gammas) if positive else gammas
    assert row.gammas == pytest.approx(dict(zip(names, expected.tolist(), strict=True)))
    assert row.spectral_norms == pytest.approx(dict(zip(names, expected.abs().tolist(), strict=True)), rel=0.01)
    assert inspect(model, reparam="spectral_norm")["encoder.layers.4"].gammas == {}  # 1, and not learned


def test_a_reparametrised_model_and_the_same_with_plain_weights_have_the_same_numbers():
    from speech_mt.reparam import fold_state_dict

    model = Transformer()
    sigma_reparam(model, gamma_init="spectral")
    rows = inspect_weights(model.state_dict(), OPTIONS)
    folded = inspect_weights(fold_state_dict(model.state_dict()), OPTIONS)
    for row, plain in zip(rows, folded, strict=True):
        assert row.gammas
        assert not plain.gammas
        assert (row.spectral_norms, row.per_head, row.numbers) == (plain.spectral_norms, plain.per_head, plain.numbers)


def test_other_names_for_the_same_weights():
    state = Transformer().state_dict()
    expected = inspect_weights(state, OPTIONS)[0]
    conformer, fused, prefixed = {}, {}, {}
    for name, value in state.items():
        renamed = name.replace("out_proj", "linear_out")
        for letter in "qkv":
            renamed = renamed.replace(f"{letter}_proj", f"linear_{letter}")
        conformer[renamed] = value
        prefixed[f"w2v_encoder.w2v_model.{name}"] = value
        if "k_proj" in name:
            parts = [state[name.replace("k_proj", f"{letter}_proj")] for letter in "qkv"]
            fused[name.replace("k_proj.", "in_proj_")] = torch.cat(parts)
        elif "v_proj" not in name and "q_proj" not in name:
            fused[name] = value
    for other in (conformer, fused, prefixed):
        row = inspect_weights(other, OPTIONS)[0]
        assert row.spectral_norms == expected.spectral_norms
        assert row.per_head == expected.per_head
        assert row.numbers["asymmetry"] == pytest.approx(expected.numbers["asymmetry"], rel=1e-4)


def test_without_a_number_of_heads_the_rest_is_still_there():
    row = inspect_weights(Transformer().state_dict(), {})[0]
    assert len(row.spectral_norms) == 6
    assert (row.per_head, row.numbers) == ({}, {})


def test_bad_input_is_named():
    with pytest.raises(InputError, match="no Transformer: .* found a"):
        inspect_weights({"a": torch.zeros(2, 2)}, OPTIONS)
    with pytest.raises(InputError, match=r"encoder\.layers\.0\.self_attn: 16 rows .* 3 heads"):
        inspect_weights(Transformer().state_dict(), {"encoder_attention_heads": 3})


def test_options_are_found_wherever_fairseq_keeps_them():
    flat = {"_name": "transformer", "encoder_attention_heads": 4}
    nested = {"_name": "transformer", "encoder": {"attention_heads": 4}}
    for state in (
        {"cfg": {"model": flat}},
        {"cfg": {"model": Namespace(**flat)}, "args": None},
        {"args": Namespace(**flat), "cfg": None},
        {"cfg": {"model": nested}},
    ):
        assert model_options(state)["encoder_attention_heads"] == 4


# -- what stands out ----------------------------------------------------------------------------------------


def told(model, **options):
    return [str(worry) for worry in find_worries(list(inspect(model, **options).values()))]


@pytest.mark.parametrize("placement", ["post", "pre", "deepnorm", "subln"])
def test_nothing_stands_out_in_a_new_model(placement):
    assert told(Transformer(norm_placement=placement), norm_placement=placement) == []


@torch.no_grad()
def test_each_planted_fault_is_found_with_its_layer_and_head():
    model = Transformer()
    model.encoder.layers[1].fc1.weight[3, 2] = math.nan
    model.encoder.layers[2].fc2.weight.mul_(0.01)
    model.encoder.layers[3].self_attn.q_proj.weight[8:12].mul_(60)  # head 2
    model.decoder.layers[4].encoder_attn.v_proj.weight.mul_(8)
    found = told(model)
    assert found[0] == "encoder.layers.1.fc1: holds NaN or Inf"
    assert found[1].startswith("encoder.layers.3.self_attn head 2: ||W_Q W_K^T||")
    assert found[2].startswith("encoder.layers.3.self_attn head 2: logits of unrelated tokens")
    assert [line.partition(": ")[0] for line in found[3:]] == [
        "encoder.layers.2.fc2",
        "encoder.layers.3.self_attn.q_proj",
        "decoder.layers.4.encoder_attn.v_proj",
    ]


@torch.no_grad()
def test_query_key_norms_mean_nothing_where_queries_and_keys_are_normalised():
    model = Transformer(qk_norm=True)
    model.encoder.layers[3].self_attn.q_proj.weight[8:12].mul_(60)
    assert [line.partition(": ")[0] for line in told(model)] == ["encoder.layers.3.self_attn.q_proj"]


def row_with_heads(layer, norms, energy):
    heads = {"query_key_norm": norms, "energy_concentration": [energy] * 2, "effective_rank": [1.5, 1.5]}
    return LayerNumbers("encoder", layer, f"encoder.layers.{layer}", per_head=heads)


def test_three_times_the_median_is_too_much_only_at_low_rank():
    for energy, expected in ((0.5, 0), (0.95, 1)):
        rows = [row_with_heads(layer, [1.0, 3.0 if layer == 2 else 1.0], energy) for layer in range(4)]
        found = find_worries(rows)
        assert len(found) == expected
        assert all(worry.where == "encoder.layers.2.self_attn head 1" for worry in found)
        assert all("3 times the median" in worry.why for worry in found)


@torch.no_grad()
def test_a_stale_sigma_is_found():
    model = Transformer()
    sigma_reparam(model)
    assert told(model) == []
    model.decoder.layers[0].fc1.parametrizations.weight.original.normal_()  # u and v are not its own
    (found,) = told(model)
    assert found.startswith("decoder.layers.0.fc1: spectral norm")


def on_data(entropy, logit, cosine):
    """Measurements of three encoder layers with two heads."""
    measured = Measured()
    measured.heads = {
        "entropy_normalised/encoder": torch.tensor(entropy),
        "max_logit/encoder": torch.tensor(logit),
    }
    measured.layers = {"cosine/encoder": cosine, "rank_residual/encoder": {i: 1 - c for i, c in cosine.items()}}
    rows = [LayerNumbers("encoder", i, f"encoder.layers.{i}") for i in range(3)]
    add_data(rows, measured)
    return find_worries(rows)


def test_neighbouring_layers_with_one_fault_are_one_worry():
    uniform = [[0.9, 0.8], [0.9995, 0.9999], [1.0, 1.0]]
    alike, dull = on_data(uniform, [[2.0, 3.0]] * 3, {0: 0.5, 1: 0.9991, 2: 0.9999})
    assert (alike.kind, alike.layers) == ("encoder", (1, 2))
    assert str(alike).startswith("encoder.layers.1-2, worst in layer 2: tokens are alike (cosine 0.9999,")
    assert str(dull).startswith("encoder.layers.1-2.self_attn, worst in layer 2: attention is uniform in all heads")
    apart = on_data([[0.9, 0.8]] * 3, [[2.0, 3.0]] * 3, {0: 0.9991, 1: 0.5, 2: 0.9999})
    assert [worry.where for worry in apart] == ["encoder.layers.0", "encoder.layers.2"]


def test_sparse_attention_alone_is_no_worry_but_large_logits_and_nan_are():
    distinct = {0: 0.1, 1: 0.1, 2: 0.1}
    assert on_data([[0.01, 0.02]] * 3, [[15.0, 20.0]] * 3, distinct) == []
    (large,) = on_data([[0.5, 0.01]] * 3, [[2.0, 3.0], [60.0, 80.0], [2.0, 3.0]], distinct)
    assert str(large) == (
        "encoder.layers.1.self_attn head 1: largest logit 80, entropy 0.01 of log(keys) (also head 0)"
    )
    (nan,) = on_data([[0.5, math.nan]] * 3, [[2.0, 3.0], [2.0, 3.0], [2.0, math.nan]], distinct)
    assert nan.where == "encoder.layers.2.self_attn head 1"


# -- the figure and the script ------------------------------------------------------------------------------


@torch.no_grad()
def test_the_figure_shows_what_there_is_and_marks_the_worried_layers():
    model = Transformer()
    model.decoder.layers[4].encoder_attn.v_proj.weight.mul_(8)
    rows = list(inspect(model).values())
    figure = make_checkpoint_figure(rows, find_worries(rows), "a title")
    drawn = [panel for panel in figure.axes if panel.axison]
    headings = [panel.get_title(loc="left") for panel in drawn]
    assert headings[:3] == ["Spectral norm of each weight\nencoder", "decoder", "cross"]
    assert not any("Gamma" in heading or "data" in heading for heading in headings)
    line = {line.get_label(): line.get_ydata() for line in drawn[0].lines}["fc1"]
    assert line == pytest.approx([row.spectral_norms["fc1"] for row in rows[:6]])
    marked = {panel.get_title(loc="left"): [patch.get_x() for patch in panel.patches] for panel in drawn[:3]}
    assert marked == {headings[0]: [], "decoder": [], "cross": [3.5]}


def run_script(monkeypatch, *arguments):
    """The script's main on the arguments."""
    path = Path(__file__).parents[2] / "scripts" / "inspect_checkpoint.py"
    spec = importlib.util.spec_from_file_location("inspect_checkpoint", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [path.name, *map(str, arguments)])
    module.main()


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of :class:`Transformer`."""
    path = tmp_path / "checkpoint.pt"
    save_checkpoint({"cfg": {"model": {"_name": "transformer"} | OPTIONS}, "model": Transformer().state_dict()}, path)
    return path


def test_the_table_has_a_row_a_layer_and_says_that_nothing_stands_out(monkeypatch, capsys, checkpoint, tmp_path):
    run_script(monkeypatch, checkpoint, "--out", tmp_path / "layers.png")
    printed = capsys.readouterr().out
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")
    tables = printed.split("\n\n")
    assert [table.strip().splitlines()[0] for table in tables[:3]] == [
        f"{k}: weights" for k in ("encoder", "decoder", "cross")
    ]
    title, header, *lines = tables[0].strip().splitlines()
    assert [line.split()[0] for line in lines] == list("012345")
    assert header.split()[:7] == ["layer", "k_proj", "v_proj", "q_proj", "out_proj", "fc1", "fc2"]
    norms = inspect_weights(Transformer().state_dict(), OPTIONS)[3].spectral_norms
    assert [float(cell) for cell in lines[3].split()[1:7]] == pytest.approx(list(norms.values()), rel=0.01)
    assert "Nothing stands out" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "layers.txt"], "--out layers.txt"),
        (["--batches", "0"], "--batches 0"),
        (["--task", "translation"], "only of use with --data"),
        (["--data", "nowhere"], "--data nowhere: no such file or folder"),
        (["--user-dir", "nowhere"], "--user-dir nowhere: no such folder"),
    ],
)
def test_a_mistake_is_one_line(monkeypatch, checkpoint, arguments, message):
    with pytest.raises(InputError, match=message):
        run_script(monkeypatch, checkpoint, *arguments)


@pytest.fixture
def trained(tmp_path, text_model, dictionary):
    """A model with sigmaReparam, its checkpoint, binarised data, and the one batch that the data make."""
    from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

    from speech_mt.models.config import SpectralTransformerConfig

    model = text_model(reparam="sigma").eval()
    sizes = SIZES | {"decoder_layers": 3, "max_target_positions": 200, "reparam": "sigma"}
    model_cfg = asdict(SpectralTransformerConfig(**sizes)) | {"_name": "spectral_transformer"}
    task_cfg = {
        "_name": "translation",
        "data": "elsewhere",
        "source_lang": "de",
        "target_lang": "en",
        "eval_bleu": True,
    }
    dataset_cfg = {"train_subset": "train", "dataset_impl": None, "required_seq_len_multiple": 1}
    state = {
        "args": None,
        "cfg": {"model": model_cfg, "task": task_cfg, "dataset": dataset_cfg},
        "model": model.state_dict(),
        "optimizer_history": [{"num_updates": 1, "criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    save_checkpoint(state, tmp_path / "checkpoint.pt")
    tokens = torch.randint(4, 44, (5, 8), generator=torch.Generator().manual_seed(0))
    tokens[:, -1] = dictionary.eos()
    for language in ("de", "en"):
        dictionary.save(str(tmp_path / f"dict.{language}.txt"))
        prefix = str(tmp_path / f"valid.de-en.{language}")
        builder = MMapIndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
        for sentence in tokens:
            builder.add_item(sentence)
        builder.finalize(f"{prefix}.idx")
    batch = {"src_tokens": tokens, "src_lengths": torch.full((5,), 8), "prev_output_tokens": tokens.roll(1, 1)}
    return model, tmp_path, batch


@torch.no_grad()
def test_on_data_the_model_is_built_and_watched(monkeypatch, capsys, trained):
    model, folder, batch = trained
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the script sets its own
    monkeypatch.setattr(sys, "path", list(sys.path))
    run_script(monkeypatch, folder / "checkpoint.pt", "--data", folder, "--json")
    report = json.loads(capsys.readouterr().out)
    assert report["worries"] == []
    monitor = Monitor(("entropy", "logits", "smoothing"))
    with monitor.watch(model):
        model(**batch)
    measured = monitor.reduce([monitor.statistics()])
    for row in report["layers"]:
        assert row["gammas"]
        for quantity in ("entropy_normalised", "max_logit"):
            expected = measured.heads[f"{quantity}/{row['kind']}"][row["layer"]].tolist()
            assert row["per_head"][quantity] == pytest.approx(expected, abs=1e-4)
        if row["kind"] != "cross":
            assert row["numbers"]["cosine"] == pytest.approx(
                measured.layers[f"cosine/{row['kind']}"][row["layer"]], abs=1e-4
            )
    with pytest.raises(InputError, match="--split dev: the task cannot read it"):
        run_script(monkeypatch, folder / "checkpoint.pt", "--data", folder, "--split", "dev")
    with pytest.raises(InputError, match="--task translate: no such task; there are .*translation"):
        run_script(monkeypatch, folder / "checkpoint.pt", "--data", folder, "--task", "translate")
    run_script(monkeypatch, folder / "checkpoint.pt", "--data", folder, "--task", "translation")
    assert "cross: on data" in capsys.readouterr().out
