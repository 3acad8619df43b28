"""examples/librispeech: the configs compose, name what exists, and are the architectures they say they are."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from speech_mt.errors import InputError

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "librispeech" / "config"
sys.path.insert(0, str(ROOT / "examples" / "librispeech"))

import update_freq  # noqa: E402

PLACES = ["task.data=data", "common.user_dir=user_dir", "common.tensorboard_logdir=t", "checkpoint.save_dir=s"]
TINY = ["model.encoder_layers=1", "model.encoder_embed_dim=16", "model.encoder_ffn_embed_dim=32"]
CTC = ["ctc_36l_100h", "ctc_36l_960h"]


def composed(name, *overrides):
    """The config as fairseq-hydra-train sees it."""
    from fairseq.dataclass.initialize import add_defaults, hydra_init
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    import user_dir  # noqa: F401 (registers)

    hydra_init(name)  # fairseq's defaults
    with initialize_config_dir(str(CONFIG), version_base="1.1"):  # the hydra that fairseq speaks
        cfg = compose(name, overrides=[*PLACES, *overrides])
    cfg = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))
    add_defaults(cfg)
    return cfg


@pytest.fixture
def task():
    from fairseq.data import Dictionary

    letters = Dictionary()
    for letter in "abcdefghijklmnopqrstuvwxyz'|":
        letters.add_symbol(letter)
    return SimpleNamespace(target_dictionary=letters, cfg=SimpleNamespace(num_mel_bins=80))


def test_every_config_is_tested():
    assert sorted(path.stem for path in CONFIG.glob("*.yaml")) == sorted([*CTC, "s2t_l_960h"])


@pytest.mark.parametrize("name", CTC)
def test_the_ctc_configs_are_the_36_layer_architecture(name):
    from argparse import Namespace

    from fairseq.models import ARCH_CONFIG_REGISTRY

    model = composed(name).model
    args = Namespace()
    ARCH_CONFIG_REGISTRY["spectral_ctc_transformer_36l"](args)
    assert {key: model[key] for key in vars(args)} == vars(args)
    from speech_mt.models.config import SpectralCTCTransformerConfig

    defaults = vars(SpectralCTCTransformerConfig())
    rest = {key: value for key, value in model.items() if key not in vars(args)}
    assert all(value == defaults[key] or key in ("_name", "max_source_positions") for key, value in rest.items())


def test_the_encoder_decoder_config_has_the_size_of_the_named_architecture():
    from argparse import Namespace

    from fairseq.models import ARCH_CONFIG_REGISTRY

    model = composed("s2t_l_960h").model
    args = Namespace(norm_placement="post")
    ARCH_CONFIG_REGISTRY["spectral_s2t_transformer_l"](args)
    assert {key: model[key] for key in vars(args)} == vars(args)


@pytest.mark.parametrize("name", [*CTC, "s2t_l_960h"])
def test_all_that_a_config_names_is_built(name, task):
    from fairseq import criterions, models, optim
    from fairseq.optim import lr_scheduler

    cfg = composed(name, *TINY)
    model = models.build_model(cfg.model, task)
    criterion = criterions.build_criterion(cfg.criterion, task)
    optimizer = optim.build_optimizer(cfg.optimizer, list(model.parameters()))
    schedule = lr_scheduler.build_lr_scheduler(cfg.lr_scheduler, optimizer)
    assert type(schedule).__name__ == ("PlateauSchedule" if name in CTC else "InverseSquareRootSchedule")
    peak = cfg.optimization.lr[0]
    assert schedule.step_update(cfg.lr_scheduler.warmup_updates) == pytest.approx(peak)
    assert cfg.optimizer.get("weight_decay", 0.0) == 0.0
    previous = torch.full((1, 4), 2)
    sample = {
        "id": torch.arange(1),
        "nsentences": 1,
        "ntokens": 4,
        "net_input": {"src_tokens": torch.randn(1, 60, 80), "src_lengths": torch.tensor([60])},
        "target": torch.tensor([[5, 6, 7, 2]]),
        "target_lengths": torch.tensor([3]),
    }
    sample["net_input"]["prev_output_tokens"] = previous
    model.set_num_updates(0)
    loss, _, _ = criterion(model, sample)
    loss.backward()
    optimizer.step()
    assert loss.isfinite()


@pytest.mark.parametrize(
    ("gpus", "max_tokens", "expected"), [(8, 24000, 1), (2, 24000, 4), (1, 12000, 16), (64, 24000, 1)]
)
def test_update_freq_keeps_the_effective_batch(gpus, max_tokens, expected):
    frames, one_gpu = update_freq.frames_an_update(CONFIG / "ctc_36l_100h.yaml")
    assert (frames, one_gpu) == (192_000, 24_000)
    assert update_freq.update_freq(frames, gpus, max_tokens) == expected


def test_update_freq_says_what_it_needs(tmp_path):
    with pytest.raises(InputError, match="no such config"):
        update_freq.frames_an_update(tmp_path / "x.yaml")
    (tmp_path / "x.yaml").write_text("dataset: {batch_size: 8}\n")
    with pytest.raises(InputError, match="max_tokens None, distributed_training"):
        update_freq.frames_an_update(tmp_path / "x.yaml")


@pytest.mark.parametrize("freq", ["[3]", "3"])
def test_update_freq_may_be_a_number_or_a_list_of_one(tmp_path, freq):
    text = "dataset: {max_tokens: 10}\ndistributed_training: {distributed_world_size: 2}\n"
    (tmp_path / "x.yaml").write_text(f"{text}optimization: {{update_freq: {freq}}}\n")
    assert update_freq.frames_an_update(tmp_path / "x.yaml") == (60, 10)


@pytest.mark.parametrize("text", [b"a: [1,\n b: }", b"- 1\n", b"\x80\x02", b"dataset: {max_tokens: abc}\n"])
def test_what_is_no_config_is_named(tmp_path, text):
    (tmp_path / "x.yaml").write_bytes(text)
    with pytest.raises(InputError, match=r"x\.yaml: "):
        update_freq.frames_an_update(tmp_path / "x.yaml")
