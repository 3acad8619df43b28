"""The fixes that fairseq needs: each is needed here, each does what its row says, once."""

import argparse
import gc
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import time
import types
import warnings

import numpy as np
import pytest
import torch
import torch.distributed
import torch.multiprocessing
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset

from speech_mt import compat
from speech_mt.compat import (
    combinations,
    data,
    environment,
    interruption,
    languages,
    logs,
    mistakes,
    processes,
    raw_text,
    training,
)
from speech_mt.compat.options import OneLineParser, check_pairs, check_words
from speech_mt.errors import InputError

# -- the table


@pytest.fixture(scope="module")
def needed() -> dict[str, list[bool]]:
    """For every fix: needed by the fairseq installed? and after it was applied? In a process of its own."""
    program = """
import json, logging, sys
import fairseq_cli.generate, speech_mt.compat as compat
before = [fix.needed() for fix in compat.FIXES]
compat.apply()
after = [fix.needed() for fix in compat.FIXES]
print(json.dumps({"before": before, "after": after, "handlers": len(logging.getLogger().handlers)}))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    return json.loads(output.splitlines()[-1])


def test_every_fix_is_needed_by_this_fairseq(needed):
    in_other_commands = (
        processes.hydra_trains_alone,
        raw_text.lines_are_split_at_carriage_returns,
        combinations.sharding_asks_for_fairscale,
        interruption.ends_without_saving,
        training.trains_beyond_the_end,
        training.unknown_metric_is_fatal,
    )
    unneeded = [f.what for f, was in zip(compat.FIXES, needed["before"], strict=True) if not was]
    assert unneeded == [f.what for f in compat.FIXES if f.needed in in_other_commands]


def test_no_fix_is_needed_twice(needed):
    assert not any(needed["after"])


def test_generate_is_left_to_configure_its_own_logging(needed):
    assert needed["handlers"] == 0


def test_the_table_says_why_and_until_when():
    assert all(fix.what and fix.why and fix.until for fix in compat.FIXES)


# -- environment


def test_a_python_without_fairseq_is_named(monkeypatch):
    monkeypatch.setattr(environment, "sys", types.SimpleNamespace(version_info=(3, 14, 0)))
    with pytest.raises(InputError, match=r"Python 3\.14: fairseq runs on 3\.11 or 3\.12 only"):
        environment.check_environment()


def test_a_missing_fairseq_says_what_to_install(monkeypatch):
    monkeypatch.setattr(
        environment.importlib.util, "find_spec", lambda name: None if name == "fairseq" else name
    )
    with pytest.raises(InputError, match="fairseq is not installed: pip install ve-fairseq=="):
        environment.check_environment()


def test_a_torchaudio_that_does_not_load_says_what_to_install(monkeypatch, tmp_path):
    (tmp_path / "torchaudio.py").write_text("raise OSError('undefined symbol: aoti_torch_abi_version')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchaudio", raising=False)
    with pytest.raises(InputError, match=r"torchaudio [\d.+a-z]+ does not fit torch .*pip install 'torch>="):
        environment.check_environment()


# -- batches


@pytest.fixture(scope="module")
def fairseq():
    compat.apply()
    import fairseq

    return fairseq


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 20), max_size=40),
    multiple=st.integers(1, 9),
    sentences=st.integers(1, 12),
)
def test_every_sample_is_in_exactly_one_batch_and_in_order(fairseq, lengths, multiple, sentences):
    indices = np.argsort(lengths, kind="stable") if lengths else np.array([], dtype=np.int64)
    batches = fairseq.data.data_utils.batch_by_size(
        indices,
        lambda index: lengths[index],
        num_tokens_vec=np.array(lengths, dtype=np.int64)[indices] if lengths else None,
        max_tokens=60,
        max_sentences=sentences,
        required_batch_size_multiple=multiple,
    )
    assert [index for batch in batches for index in batch] == list(indices)
    assert all(0 < len(batch) <= max(sentences, 1) for batch in batches)


# -- audio


def test_conversion_without_anything_to_convert_returns_the_same_samples():
    waveform = np.array([[0.1, -0.2, 0.3]], dtype=np.float32)
    converted, rate = data.convert_waveform(waveform, 16000, to_mono=True, to_sample_rate=16000)
    assert rate == 16000
    assert isinstance(converted, np.ndarray)
    np.testing.assert_array_equal(converted, waveform)


def test_channels_are_averaged_and_the_peak_becomes_one():
    stereo = torch.tensor([[0.2, 0.0], [0.0, -0.5]])
    mono, _ = data.convert_waveform(stereo, 8000, to_mono=True)
    torch.testing.assert_close(mono, torch.tensor([[0.1, -0.25]]))
    loud, _ = data.convert_waveform(stereo, 8000, normalize_volume=True)
    torch.testing.assert_close(loud, torch.tensor([[0.4, 0.0], [0.0, -1.0]]))


def test_normalised_silence_stays_finite():
    silence, _ = data.convert_waveform(np.zeros((1, 5), dtype=np.float32), 8000, normalize_volume=True)
    assert not silence.any()


def test_resampling_keeps_a_tone():
    time = np.arange(8000) / 8000
    converted, rate = data.convert_waveform(
        np.sin(2 * np.pi * 440 * time, dtype=np.float32)[None], 8000, to_sample_rate=16000
    )
    assert (converted.shape, rate) == ((1, 16000), 16000)
    expected = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    assert np.abs(converted[0, 1000:-1000] - expected[1000:-1000]).max() < 0.01  # but for the edges


# -- mistakes


def raised(function, *args) -> BaseException:
    with pytest.raises(BaseException) as info:  # noqa: PT011
        function(*args)
    return info.value


def test_a_missing_file_is_a_mistake_named_first():
    assert mistakes.summary(raised(open, "/no/such/file")) == "/no/such/file: No such file or directory"


def test_a_bug_is_no_mistake():
    assert mistakes.summary(raised(lambda: 1 / 0)) is None
    assert mistakes.summary(raised(lambda: [][1])) is None


def test_an_assertion_of_our_own_is_a_bug_but_one_of_fairseq_is_a_mistake(fairseq):
    from fairseq_cli import generate

    options = argparse.Namespace(common_eval=argparse.Namespace(path=None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate, "Namespace", type(None))  # takes `options` as they are
        assert mistakes.summary(raised(generate.main, options)) == "--path required for generation!"

    def own() -> None:
        raise AssertionError("a message")

    assert mistakes.summary(raised(own)) is None


def test_a_value_that_fairseq_refuses_is_a_mistake_but_one_that_it_stumbles_over_is_not(fairseq):
    from fairseq import checkpoint_utils, utils

    options = argparse.Namespace(finetune_from_model="x.pt", reset_optimizer=True, optimizer_overrides="{}")
    vars(options).update(dict.fromkeys(("reset_lr_scheduler", "reset_meters", "reset_dataloader", "no_save"), True))
    trainer = types.SimpleNamespace(data_parallel_rank=0)
    refused = mistakes.summary(raised(checkpoint_utils.load_checkpoint, options, trainer))
    assert refused.startswith("--finetune-from-model can not be set together with")
    assert mistakes.summary(raised(utils.eval_str_list, "one")) is None


def test_what_a_configuration_says_wrongly_is_named(fairseq):
    from fairseq.criterions import CRITERION_REGISTRY  # noqa: F401 (registers)
    from fairseq.dataclass.configs import CommonConfig
    from omegaconf import OmegaConf

    config = OmegaConf.structured(CommonConfig)
    assert mistakes.summary(raised(setattr, config, "seed", "many")).startswith("seed: Value 'many'")
    OmegaConf.set_struct(config, True)
    assert mistakes.summary(raised(lambda: config["sed"])) == "sed: Key 'sed' not in 'CommonConfig'"
    criterion = OmegaConf.create({"_name": "label_smoothed"})
    message = "'label_smoothed': no criterion, optimizer, schedule or other choice has this _name"
    assert mistakes.summary(raised(fairseq.criterions.build_criterion, criterion, None)) == message


class Refusing(Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        raise InputError("clip.wav: 399 samples, shorter than one window")


def test_what_a_dataloader_worker_raised_is_found():
    error = raised(lambda: list(DataLoader(Refusing(), num_workers=1)))
    assert mistakes.summary(error) == "clip.wav: 399 samples, shorter than one window"


def test_what_a_spawned_process_raised_is_found():
    """The text is torch's own, as :mod:`torch.multiprocessing.spawn` builds it around a child's traceback."""
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback (most recent call last):\n"
    text += '  File "a.py", line 1, in main\n    open(path)\n    ^^^^\n'
    for last, line in (
        ("FileNotFoundError: [Errno 2] No such file or directory: 'x y'\n", "x y: No such file or directory"),
        ("speech_mt.errors.InputError: x.tsv line 3: two\n  fields\n", "x.tsv line 3: two fields"),
        ("KeyError: 'loss'\n", None),
    ):
        error = torch.multiprocessing.ProcessRaisedException(text + last, 1, 1)
        assert mistakes.summary(raised(lambda error=error: (_ for _ in ()).throw(error))) == line


def test_the_hook_prints_one_line_or_everything(monkeypatch, capsys):
    error = raised(open, "/no/such/file")
    mistakes.excepthook(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == "error: /no/such/file: No such file or directory\n"
    monkeypatch.setenv("SPEECH_MT_TRACEBACK", "1")
    mistakes.excepthook(type(error), error, error.__traceback__)
    assert "Traceback" in capsys.readouterr().err


# -- languages


@pytest.mark.parametrize(
    ("given", "pair", "found"),
    [
        ((None, None), ("de", "en"), ("de", "en")),
        (("de", None), ("de", "en"), ("de", "en")),
        (("en", None), ("de", "en"), ("en", "de")),
        ((None, "de"), ("de", "en"), ("en", "de")),
        (("fr", None), ("de", "en"), None),
        ((None, "en"), (None, None), None),
    ],
)
def test_one_language_tells_the_direction(given, pair, found):
    if found is None:
        with pytest.raises(InputError, match=r"--(source|target)-lang \w+: .* in bin; give"):
            languages.complete(*given, pair, "bin")
    else:
        assert languages.complete(*given, pair, "bin") == found


# -- options


@pytest.fixture
def parser() -> OneLineParser:
    parser = OneLineParser(allow_abbrev=False)
    parser.add_argument("data")
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--arch", choices=["transformer", "lstm"])
    return parser


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bin", "--max-tokenz", "40"], "error: no option --max-tokenz: did you mean --max-tokens?\n"),
        (["bin", "--max-tokenz=40"], "error: no option --max-tokenz: did you mean --max-tokens?\n"),
        (
            ["bin", "--arch", "transfomer"],
            "error: argument --arch: no choice 'transfomer': did you mean transformer?\n",
        ),
        (["bin", "--arch", "xyz"], "error: argument --arch: no choice 'xyz': there are lstm, transformer\n"),
        (["bin", "--max-tokens", "x"], "error: argument --max-tokens: invalid int value: 'x'\n"),
        ([], "error: the following arguments are required: data\n"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(parser, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        parser.parse_args(arguments)
    assert exit.value.code == 2
    assert capsys.readouterr().err == message


def test_bf16_is_no_tpu_unless_asked_for(fairseq):
    from fairseq import options

    def parse(*arguments: str) -> argparse.Namespace:
        return options.parse_args_and_arch(
            options.get_training_parser(), ["bin", "--arch", "lstm", *arguments]
        )

    assert not parse("--bf16").tpu
    assert parse("--bf16").bf16
    assert parse("--bf16", "--tpu").tpu


# -- logs


def test_only_a_command_whose_logging_came_too_late_is_given_it(monkeypatch):
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        root.handlers.clear()
        logging.basicConfig(level=logging.DEBUG)
        monkeypatch.setattr(logs, "_commands", set)
        assert not logs.root_logs_debug()  # a program that uses fairseq and logs as it likes
        monkeypatch.setattr(logs, "_commands", lambda: {"interactive", "generate"})
        assert logs.root_logs_debug()
        logs.restore_logs()
        assert not logs.root_logs_debug()
        assert [handler.stream for handler in root.handlers] == [sys.stdout]
        assert root.level == logging.INFO
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def test_only_the_listed_warnings_are_silenced():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        logs.silence_idle_warnings()
        warnings.warn("'pin_memory' argument is set as true but no accelerator is found")
        warnings.warn("\n'config' is validated against ConfigStore schema with the same name.")
        warnings.warn("This DataLoader will create 8 worker processes")
    assert [str(warning.message) for warning in caught] == ["This DataLoader will create 8 worker processes"]


# -- processes


@pytest.fixture
def distributed() -> types.SimpleNamespace:
    return types.SimpleNamespace(
        distributed_init_method=None,
        distributed_world_size=1,
        distributed_rank=0,
        distributed_no_spawn=False,
        distributed_backend="nccl",
        device_id=0,
    )


@pytest.fixture
def torchrun(monkeypatch):
    for name, value in {
        "WORLD_SIZE": "4",
        "RANK": "3",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(("on_cpu", "backend", "device"), [(True, "gloo", 0), (False, "nccl", 1)])
def test_rank_and_world_size_come_from_torchrun(distributed, torchrun, on_cpu, backend, device):
    processes.configure(distributed, on_cpu)
    assert distributed.distributed_init_method == "env://"
    assert (distributed.distributed_world_size, distributed.distributed_rank) == (4, 3)
    assert distributed.distributed_no_spawn
    assert (distributed.distributed_backend, distributed.device_id) == (backend, device)


def test_a_single_process_is_left_alone(distributed, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    before = vars(distributed).copy()
    processes.configure(distributed, on_cpu=True)
    assert vars(distributed) == before


def test_an_explicit_init_method_on_a_cpu_spawns_nothing(distributed):
    distributed.distributed_init_method = "tcp://127.0.0.1:1"
    processes.configure(distributed, on_cpu=True)
    assert distributed.distributed_no_spawn


def test_several_cpu_processes_that_nobody_started_are_refused(distributed, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    distributed.distributed_world_size = 2
    with pytest.raises(InputError, match="run torchrun --nproc_per_node=2"):
        processes.configure(distributed, on_cpu=True)


@pytest.fixture
def group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_anything_is_gathered_on_a_cpu(fairseq, group):
    from fairseq.distributed import utils

    statistics = [{"wer": 0.5, "pairs": ["a" * 20000]}]  # larger than fairseq's buffer
    assert utils.all_gather_list(statistics, group=group) == [statistics]


def test_ddp_wraps_a_model_on_a_cpu(fairseq, group):
    from fairseq.models import distributed_fairseq_model

    wrapped = distributed_fairseq_model.DistributedDataParallel(
        nn.Linear(2, 1), device_ids=[0], output_device=0
    )
    assert wrapped(torch.ones(3, 2)).shape == (3, 1)


def test_what_rank_0_sends_on_resuming_loads_with_weights_only(fairseq, tmp_path):
    from fairseq.distributed.utils import _TensorPlaceholder
    from omegaconf import OmegaConf

    cfg = OmegaConf.create(
        {"model": argparse.Namespace(arch="x"), "lr": [0.1, None], "n": 1}, flags={"allow_objects": True}
    )
    OmegaConf.set_struct(cfg, True)
    sent = {"cfg": cfg, "model": {"weight": _TensorPlaceholder(0)}, "best": np.float64(2.5)}
    torch.save(sent, tmp_path / "sent")
    assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD" not in os.environ
    received = torch.load(tmp_path / "sent")
    assert received == sent
    assert OmegaConf.is_struct(received["cfg"])


def test_the_search_for_a_nan_names_the_module_and_raises_nothing(fairseq, text_model, text_batch, caplog):
    """A NaN gradient that begins in the decoder's first layer; fairseq's own hooks raise StopIteration there."""
    from fairseq.nan_detector import NanDetector

    model = text_model()
    model.decoder.layers[0].fc1.register_full_backward_hook(lambda *_: (torch.full((4, 7, 32), float("nan")),))
    with caplog.at_level(logging.WARNING), NanDetector(model):
        model(**text_batch["net_input"])[0].sum().backward()
    assert "NaN detected in output of decoder.layers.0" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nbest": 6, "beam": 5}, "--nbest 6: there are only --beam 5 hypotheses"),
        ({"nbest": 6, "beam": 9, "ctc_beam": 4}, "--nbest 6: there are only --ctc-beam 4 hypotheses"),
        ({"lr_scheduler": "inverse_sqrt", "warmup_updates": 0}, "--warmup-updates 0: inverse_sqrt"),
        ({"adam_betas": "(0.9)"}, "--adam-betas .*: give two"),
        ({"beam": 5, "diverse_beam_groups": 3}, "--diverse-beam-groups 3: has to divide --beam 5"),
        ({"post_process": "bogus"}, r"--post-process \(--remove-bpe\) bogus: there are sentencepiece, "),
        ({"model_overrides": "{"}, "--model-overrides {: give a dictionary"),
        ({"model_overrides": "5"}, "--model-overrides 5: give a dictionary"),
    ],
)
def test_options_that_fairseq_stumbles_over_late_are_named(options, message):
    check = check_words if options.keys() & {"post_process", "model_overrides"} else check_pairs
    with pytest.raises(InputError, match=message):
        check(argparse.Namespace(**options))


def test_options_that_go_together(fairseq):
    for options in (
        {"nbest": 5, "beam": 5},
        {"nbest": 6, "beam": 5, "ctc_beam": 16},
        {"lr_scheduler": "polynomial_decay", "warmup_updates": 0, "adam_betas": "(0.9, 0.98)"},
        {"beam": 6, "diverse_beam_groups": 3, "post_process": "@@ ", "model_overrides": "{'dropout': 0.1}"},
    ):
        check_words(argparse.Namespace(**options))
        check_pairs(argparse.Namespace(**options))


def test_prefetching_ends_before_python_does():
    """Killed inside C++ code, its thread would abort the process; here it sleeps in Python and must be waited for."""
    program = """
import atexit, time
from speech_mt import compat
compat.apply()
from fairseq.data.iterators import BufferedIterator

class Batches:
    def __len__(self):
        return 1000
    def __iter__(self):
        for i in range(1000):
            time.sleep(0.01)
            yield i

batches = BufferedIterator(2, Batches())
print([next(batches) for _ in range(3)])
atexit._run_exitfuncs()
print(batches._consumer.is_alive())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["[0, 1, 2]", "False"]


def test_the_workers_of_an_epoch_end_with_it(fairseq):
    """They do not wait for the garbage collector: those that did took minutes to end, and delayed the training."""
    from fairseq.data import FairseqDataset
    from fairseq.tasks import FairseqTask

    class Numbers(FairseqDataset):
        can_reuse_epoch_itr_across_epochs = False

        def __getitem__(self, index):
            return index

        def __len__(self):
            return 3

        def ordered_indices(self):
            return np.arange(3)

        def batch_by_size(self, indices, **kwargs):
            return [[i] for i in indices]

        def collater(self, samples):
            return samples

    task, numbers = FairseqTask(None), Numbers()
    of_other_tests = set(multiprocessing.active_children())
    gc.disable()
    try:
        for epoch in (1, 2):
            iterator = task.get_batch_iterator(numbers, epoch=epoch, num_workers=2, data_buffer_size=2)
            assert sorted(iterator.next_epoch_itr()) == [[0], [1], [2]]
        deadline = time.monotonic() + 30  # without the garbage collector they would stay for good
        while (left := set(multiprocessing.active_children()) - of_other_tests) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not left
    finally:
        gc.enable()
        for process in set(multiprocessing.active_children()) - of_other_tests:
            process.kill()


def test_bleu_of_empty_hypotheses(fairseq):
    from fairseq.scoring.bleu import BleuConfig, Scorer

    scorer, empty = Scorer(BleuConfig(pad=1, eos=2, unk=3)), torch.IntTensor([])
    scorer.add(torch.IntTensor([5, 6, 7, 8, 9]), empty)
    assert "BLEU4 = 0.00" in scorer.result_string()
    scorer.add(torch.IntTensor([5, 6, 7, 8, 9]), torch.IntTensor([5, 6, 7, 8, 9]))
    assert scorer.stat.reflen == 10
    assert scorer.stat.predlen == 5


def test_word_errors_are_counted_without_editdistance(fairseq):
    import editdistance

    assert editdistance.eval(["a", "b", "c"], ["a", "x", "c", "d"]) == 2
    assert editdistance.eval([1, 2], []) == 2
