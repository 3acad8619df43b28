"""A run reads back as it was logged, whatever became of it, and the figure and the page show that and no more."""

import importlib.util
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

from speech_mt.diagnostics.collapse import ENTROPY_COLLAPSE, RANK_COLLAPSE, Collapse
from speech_mt.diagnostics.tensorboard import Board
from speech_mt.errors import InputError
from speech_mt.plotting.figures import make_figure
from speech_mt.plotting.heat_maps import cell_edges, make_heat_maps
from speech_mt.plotting.report import last_numbers, make_report
from speech_mt.plotting.runs import default_labels, find_runs, load_run

NAN, INF = float("nan"), float("inf")


def write(folder, scalars, walltime=0.0):
    """One event file: tag to [(step, value), ...], a second of wall time apart."""
    with SummaryWriter(str(folder)) as writer:
        for tag, points in scalars.items():
            for index, (step, value) in enumerate(points):
                writer.add_scalar(tag, value, step, walltime=walltime + index)


def layered(quantity, values_per_layer, steps=(10, 20, 30)):
    return {
        f"{quantity}/{layer:02d}": list(zip(steps, values, strict=True))
        for layer, values in enumerate(values_per_layer)
    }


@pytest.fixture
def logdir(tmp_path):
    """A run of three log intervals with two encoder layers, and one validation."""
    tb = tmp_path / "stock" / "tb"
    scalars = {"loss": [(10, 6.0), (20, 5.0), (30, 4.5)], "gnorm": [(10, 2.0), (20, 1.0), (30, 0.5)]}
    scalars |= layered("entropy_normalised/encoder", [[1.0, 0.75, 0.5], [1.0, 0.875, 0.25]])
    scalars |= layered("cosine/encoder", [[0.0, -0.25, 0.5], [0.5, 0.5, 1.0]])
    write(tb / "train_inner", scalars)
    write(tb / "train", {"loss": [(30, 5.25)], "ppl": [(30, 38.0)]})
    write(tb / "valid", {"loss": [(30, 4.75)]})
    return tb


def drawn_lines(figure):
    """gid to (x, y) of every line that says what it is."""
    return {
        line.get_gid(): line.get_data() for axes in figure.axes for line in axes.lines if ": " in (line.get_gid() or "")
    }


def warn(folder, *collapses):
    board = Board(("entropy",))
    for collapse in collapses:
        board.warn(collapse)
    with SummaryWriter(str(folder)) as writer:
        board.write(writer)


# -- reading ------------------------------------------------------------------------------------------------


def test_scalars_and_layers_read_back(logdir):
    run = load_run(logdir, "stock")
    steps, values = run.scalar("loss")
    assert steps.tolist() == [10, 20, 30]
    assert values.tolist() == [6.0, 5.0, 4.5]
    assert run.scalar("loss", "train").values.tolist() == [5.25]
    assert run.scalar("ppl").values.tolist() == [38.0]  # logged at the end of epochs only
    assert run.scalar("loss", "valid").values.tolist() == [4.75]
    assert run.valid_splits == ["valid"]
    assert run.last_update == 30
    assert run.quantities == ["cosine/encoder", "entropy_normalised/encoder"]
    steps, values = run.layers("entropy_normalised/encoder")
    assert steps.tolist() == [10, 20, 30]
    assert values.tolist() == [[1.0, 1.0], [0.75, 0.875], [0.5, 0.25]]


def test_what_was_never_logged_is_empty(logdir):
    run = load_run(logdir)
    assert run.scalar("max").steps.shape == run.scalar("max").values.shape == (0,)
    assert run.layers("cosine/decoder").values.shape == (0, 0)
    assert run.scalar("loss", "test").steps.size == 0


def test_layers_measured_at_different_updates(tmp_path):
    points = {"cosine/encoder/00": [(10, 0.5), (30, 0.25)], "cosine/encoder/02": [(20, 0.75)]}
    write(tmp_path / "train_inner", points)
    steps, values = load_run(tmp_path).layers("cosine/encoder")
    assert steps.tolist() == [10, 20, 30]
    np.testing.assert_array_equal(values, [[0.5, NAN, NAN], [NAN, NAN, 0.75], [0.25, NAN, NAN]])


def test_resumed_run_takes_the_later_values(tmp_path):
    # stopped at 40, resumed from the checkpoint of update 20 with another log interval: 30 and 40 never were
    write(tmp_path / "train_inner", {"loss": [(10, 6.0), (20, 5.0), (30, NAN), (40, NAN)]}, walltime=100)
    write(tmp_path / "train_inner", {"loss": [(25, 4.0), (35, 3.0)]}, walltime=200)
    steps, values = load_run(tmp_path).scalar("loss")
    assert steps.tolist() == [10, 20, 25, 35]
    assert values.tolist() == [6.0, 5.0, 4.0, 3.0]


def test_later_wins_whatever_the_names_of_the_files(tmp_path):
    write(tmp_path / "train_inner", {"loss": [(10, 8.0), (20, 9.0)]}, walltime=100)
    next((tmp_path / "train_inner").iterdir()).rename(tmp_path / "train_inner" / "events.out.tfevents.9.z")
    write(tmp_path / "train_inner", {"loss": [(10, 1.0), (20, 2.0)]}, walltime=200)
    assert load_run(tmp_path).scalar("loss").values.tolist() == [1.0, 2.0]


def test_event_file_cut_off_in_a_record_keeps_what_came_before(logdir):
    file = next((logdir / "train_inner").iterdir())
    file.write_bytes(file.read_bytes()[:-7])
    assert load_run(logdir).scalar("loss").values.tolist() == [6.0, 5.0, 4.5]


def test_warnings_of_the_collapse_detector_come_with_the_run(logdir):
    assert load_run(logdir).warnings == ()
    rank = Collapse(RANK_COLLAPSE, "decoder", (1,), None, 30, "tokens alike")
    entropy = Collapse(ENTROPY_COLLAPSE, "encoder", (0, 1), 3, 20, "it fell, and fell")
    warn(logdir / "train_inner", rank, entropy)
    found = load_run(logdir).warnings
    assert found == ((20, ENTROPY_COLLAPSE, str(entropy)), (30, RANK_COLLAPSE, str(rank)))


def test_run_is_found_below_the_folder(logdir):
    assert find_runs(logdir) == find_runs(logdir.parent.parent) == [logdir]
    assert load_run(logdir.parent.parent).folder == logdir


def test_folder_of_several_runs_asks_which(logdir, tmp_path):
    write(tmp_path / "sigma" / "tb" / "train_inner", {"loss": [(10, 1.0)]})
    assert len(find_runs(tmp_path)) == 2
    with pytest.raises(InputError, match=r"2 runs, give one of: .*sigma/tb, .*stock/tb"):
        load_run(tmp_path)


def test_bad_folders_are_named(tmp_path, logdir):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=f"{empty}: no event files"):
        load_run(empty)
    with pytest.raises(InputError, match="missing: no such folder"):
        load_run(tmp_path / "missing")
    with pytest.raises(InputError, match=r"train_inner: event files only in .*train_inner; expected a folder with"):
        load_run(logdir / "train_inner")
    write(tmp_path / "new" / "train_inner", {})
    with pytest.raises(InputError, match="new: its event files hold no scalars yet"):
        load_run(tmp_path / "new")


@pytest.mark.parametrize(
    ("folders", "labels"),
    [
        (["exp/stock/tb", "exp/sigma/tb"], ["stock", "sigma"]),
        (["exp/stock/tb"], ["stock/tb"]),
        (["a/x/tb", "b/x/tb", "b/y/tb"], ["a/x", "b/x", "b/y"]),
        (["exp", "exp/more"], ["exp", "more"]),
    ],
)
def test_default_labels_tell_runs_apart(folders, labels):
    assert default_labels([Path(folder) for folder in folders]) == labels


# -- drawing ------------------------------------------------------------------------------------------------


def test_figure_holds_every_line_and_no_other(logdir):
    lines = drawn_lines(make_figure([load_run(logdir, "stock")]))
    assert set(lines) == {
        "stock: loss 6 → 4.5",
        "stock: loss on valid 4.75 → 4.75",
        "stock: gradient norm 2 → 0.5",
        "stock: entropy_normalised/encoder, layer 0 1 → 0.5",
        "stock: entropy_normalised/encoder, layer 1 1 → 0.25",
        "stock: cosine/encoder, layer 0 0 → 0.5",
        "stock: cosine/encoder, layer 1 0.5 → 1",
    }
    x, y = lines["stock: entropy_normalised/encoder, layer 1 1 → 0.25"]
    assert x.tolist() == [10, 20, 30]
    assert y.tolist() == [1.0, 0.875, 0.25]


def test_runs_share_axes(logdir, tmp_path):
    short = {"loss": [(10, 9.0)]} | layered("cosine/encoder", [[-0.5]], steps=(10,))
    write(tmp_path / "short" / "train_inner", short)
    figure = make_figure([load_run(logdir, "long"), load_run(tmp_path / "short", "short")])
    cosines = [axes for axes in figure.axes if any("cosine" in (line.get_gid() or "") for line in axes.lines)]
    assert len(cosines) == 2
    assert cosines[0].get_xlim() == cosines[1].get_xlim()
    assert cosines[0].get_ylim() == cosines[1].get_ylim()
    assert cosines[0].get_ylim()[0] < -0.5
    assert cosines[0].get_xlim()[1] >= 30


def test_not_finite_is_a_marked_gap_and_not_measured_is_not(tmp_path):
    points = {
        "loss": [(10, 6.0), (20, NAN), (30, INF), (40, 5.0)],
        "cosine/encoder/00": [(10, 0.5), (40, 0.25)],
        "cosine/encoder/01": [(20, 0.5)],
    }
    write(tmp_path / "train_inner", points)
    lines = drawn_lines(make_figure([load_run(tmp_path, "run")]))
    np.testing.assert_array_equal(lines["run: loss 6 → 5"][1], [6.0, NAN, NAN, 5.0])
    marks = lines["run: loss not finite at 2 of 4 points, first at update 20"]
    assert marks[0].tolist() == [20, 30]
    assert lines["run: cosine/encoder, layer 0 0.5 → 0.25"][0].tolist() == [10, 40]
    assert sum("not finite" in gid for gid in lines) == 1


def test_all_values_not_finite_still_draws(tmp_path):
    scalars = {"loss": [(10, NAN), (20, NAN)], "gnorm": [(10, INF), (20, NAN)]}
    write(tmp_path / "train_inner", scalars | layered("max_logit/cross", [[NAN, INF]], steps=(10, 20)))
    run = load_run(tmp_path, "diverged")
    assert any("not finite at 2 of 2" in gid for gid in drawn_lines(make_figure([run])))
    assert last_numbers(run)["max_logit/cross"] == "not finite"
    assert "diverged" in make_report([run])


def test_one_point_at_the_start_still_draws(tmp_path):
    write(tmp_path / "train_inner", {"loss": [(0, 6.0)]} | layered("cosine/encoder", [[0.5]], steps=(0,)))
    figure = make_figure([load_run(tmp_path, "run")])
    markers = {line.get_marker() for axes in figure.axes for line in axes.lines if line.get_gid()}
    assert markers == {"o"}  # a line of one point would not be seen
    assert figure.axes[0].get_xlim()[1] > 0


def test_run_without_monitor_has_its_loss_and_no_row(logdir, tmp_path):
    write(tmp_path / "plain" / "train_inner", {"loss": [(10, 3.0), (20, 2.0)]})
    plain, full = load_run(tmp_path / "plain", "plain"), load_run(logdir, "full")
    assert len(make_figure([plain]).axes) == 1
    both, alone = make_figure([plain, full]), make_figure([full])
    assert len(both.axes) == len(alone.axes)
    assert "plain: loss 3 → 2" in drawn_lines(both)


def test_wide_losses_get_a_logarithmic_axis(tmp_path):
    write(tmp_path / "train_inner", {"loss": [(10, 300.0), (20, 0.5)]})
    assert make_figure([load_run(tmp_path)]).axes[0].get_yscale() == "log"
    write(tmp_path / "narrow" / "train_inner", {"loss": [(10, 6.0), (20, 5.0)]})
    assert make_figure([load_run(tmp_path / "narrow")]).axes[0].get_yscale() == "linear"


def test_large_logits_get_logarithmic_axes_that_all_share(tmp_path):
    write(
        tmp_path / "train_inner",
        layered("max_logit/encoder", [[1.0, 10.0, 1e6]]) | layered("max_logit/cross", [[-5.0, 2.0, 9.0]]),
    )
    panels = [
        axes for axes in make_figure([load_run(tmp_path)]).axes if axes.get_title(loc="left") in ("encoder", "cross")
    ]
    assert [panel.get_yscale() for panel in panels] == ["symlog", "symlog"]
    assert panels[0].get_ylim() == panels[1].get_ylim() == (-10.0, 2e6)


def test_the_first_warning_is_marked_in_the_figure_and_all_are_in_the_page(logdir):
    first = Collapse(ENTROPY_COLLAPSE, "encoder", (0,), 3, 20, "logits < 1e9")
    second = Collapse(RANK_COLLAPSE, "decoder", (1,), None, 30, "tokens alike")
    warn(logdir / "train_inner", first, second)
    run = load_run(logdir, "stock")
    marks = {gid: x for gid, (x, _) in drawn_lines(make_figure([run])).items() if "collapse" in gid}
    assert marks == {f"stock: {first}": [20, 20]}
    page = make_report([run])
    assert "logits &lt; 1e9" in page
    assert "tokens alike" in page


def test_every_quantity_of_every_kind_has_a_panel(tmp_path):
    names = [f"{q}/{k}" for q in ("entropy_normalised", "max_logit", "spectral_norm", "gamma")
             for k in ("encoder", "decoder", "cross")] + ["cosine/encoder", "cosine/decoder"]  # fmt: skip
    scalars = {"loss": [(10, 1.0)]}
    for name in names:
        scalars |= layered(name, [[1.0], [2.0], [3.0]], steps=(10,))
    write(tmp_path / "train_inner", scalars)
    figure = make_figure([load_run(tmp_path, "run")])
    assert len(figure.axes) == 1 + len(names) + 1  # loss, panels, colour bar
    lines = drawn_lines(figure)
    assert all(sum(name in gid for gid in lines) == 3 for name in names)


def test_heat_map_cells_lie_at_layer_and_update(logdir):
    mesh = make_heat_maps([load_run(logdir)], "entropy_normalised/encoder").axes[0].collections[0]
    np.testing.assert_array_equal(mesh.get_array(), [[1.0, 0.75, 0.5], [1.0, 0.875, 0.25]])
    assert mesh.norm.vmin == 0.25
    assert mesh.norm.vmax == 1.0
    assert cell_edges(np.array([10, 20, 40])).tolist() == [5, 15, 30, 50]
    assert cell_edges(np.array([7])).tolist() == [6.5, 7.5]


# -- the page and the command -------------------------------------------------------------------------------


def test_last_numbers(logdir):
    numbers = last_numbers(load_run(logdir))
    assert numbers["updates"] == "30"
    assert numbers["training loss (bits)"] == "4.5"
    assert numbers["valid loss (bits)"] == "4.75 (best 4.75)"
    assert numbers["gradient norm"] == "0.5"
    assert numbers["entropy_normalised/encoder"] == "0.375 (0.25 to 0.5)"


def test_page_is_self_contained_and_names_its_lines(logdir):
    label = "<b>$x & y"
    page = make_report([load_run(logdir, label)], "A <title>")
    assert "<b>" not in page
    assert "&lt;b&gt;$x &amp; y" in page
    references = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)|url\(([^)]*)""", page)
    assert references
    assert all((a or b).startswith(("#", "data:image/png;base64,")) for a, b in references)
    assert "<script" not in page
    svg = re.search(r"<svg.*?</svg>", page, re.DOTALL)[0]
    titles = [title.text for title in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]
    assert f"{label}: cosine/encoder, layer 1 0.5 → 1" in titles


def plot_run(*arguments):
    """Run the script's main on the arguments."""
    path = Path(__file__).parents[2] / "scripts" / "plot_run.py"
    spec = importlib.util.spec_from_file_location("plot_run", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    before, sys.argv = sys.argv, ["plot_run.py", *map(str, arguments)]
    try:
        module.main()
    finally:
        sys.argv = before


def test_command_writes_picture_and_page(logdir, tmp_path, capsys):
    out, page = tmp_path / "new" / "run.png", tmp_path / "report.html"
    plot_run(logdir, "--labels", "one", "--out", out, "--html", page, "--title", "T")
    assert out.read_bytes().startswith(b"\x89PNG")
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "one: " in capsys.readouterr().out
    assert sorted(path.name for path in out.parent.iterdir()) == ["run.png"]
    plot_run(logdir, "--out", tmp_path / "run.svg")
    assert ElementTree.parse(tmp_path / "run.svg").getroot().tag.endswith("svg")


def test_command_refuses_wrong_options(logdir, tmp_path):
    with pytest.raises(InputError, match=r"--labels a,b: 2 names for 1 runs"):
        plot_run(logdir, "--labels", "a,b")
    with pytest.raises(InputError, match=r"run.bmp: unknown picture format"):
        plot_run(logdir, "--out", tmp_path / "run.bmp")
    with pytest.raises(InputError, match=r"--out and --html are both .*run.png"):
        plot_run(logdir, "--out", tmp_path / "run.png", "--html", tmp_path / "new" / ".." / "run.png")
