"""What does not go together ends in one line that names it, before anything is trained, and leaves nothing behind."""

import re
import subprocess

import numpy as np
import pytest
import soundfile

from speech_mt.data.manifest import write_manifest

from .commands import Commands
from .conftest import BIN, PLUGIN, REPOSITORY, write_corpus

SIZE = "--encoder-layers 1 --encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2"
DECODER = "--decoder-layers 1"
COMMON = "--optimizer adam --lr 0.01 --batch-size 10 --seed 7 --cpu --max-update 1 --disable-validation"
CROSS_ENTROPY = "--criterion label_smoothed_cross_entropy_with_entropy"
TEXT = f"fairseq-train bin {PLUGIN} {COMMON} {CROSS_ENTROPY} {SIZE} {DECODER} --arch spectral_transformer"
SPEECH = f"fairseq-train speech {PLUGIN} --task speech_manifest {COMMON} {SIZE}"
CTC = f"{SPEECH} --arch spectral_ctc_transformer_tiny --conv-channels 16"
S2T = f"{SPEECH} --arch spectral_s2t_transformer_tiny --conv-channels 16 {DECODER}"
GENERATE = f"fairseq-generate bin {PLUGIN} --cpu --path"
GENERATE_SPEECH = f"fairseq-generate speech {PLUGIN} --task speech_manifest --cpu --path"


@pytest.fixture(scope="module")
def commands(tmp_path_factory, command_server):
    """A folder with a tiny corpus of text and one of speech, and a checkpoint of each kind of model."""
    folder = tmp_path_factory.mktemp("mistakes")
    write_corpus(folder)
    (folder / "speech").mkdir()
    soundfile.write(folder / "speech" / "a.flac", np.sin(np.arange(16000) / 9), 16000)
    row = {"audio": "a.flac", "duration": 1.0, "text": "one two", "speaker": "tone"}
    for split in ("train", "valid", "test"):
        write_manifest(folder / "speech" / f"{split}.tsv", [{"id": f"u{i}"} | row for i in range(3)])
    commands = Commands(command_server, folder)
    for command in (
        "fairseq-preprocess -s de -t en --destdir bin --trainpref train --validpref valid --testpref test",
        f"{REPOSITORY}/scripts/build_vocabulary.py speech/train.tsv",
        f"{TEXT} --reparam sigma --save-dir sigma",
        f"{CTC} --criterion ctc_with_entropy --save-dir ctc",
        f"{S2T} {CROSS_ENTROPY} --save-dir s2t",
        f"{REPOSITORY}/scripts/average_checkpoints.py --inputs sigma/checkpoint_last.pt --output averaged.pt",
    ):
        done = commands.run(command)
        assert done.returncode == 0, done.stderr
    return commands


SIGMA = f"{TEXT} --max-update 2 --reparam sigma --restore-file sigma/checkpoint_last.pt"
MISTAKES = {
    "another placement": (f"{SIGMA} --norm-placement pre", "--norm-placement is pre, was post"),
    "another number of heads": (f"{SIGMA} --encoder-attention-heads 4", "--encoder-attention-heads is 4, was 2"),
    "spectral norm after sigma": (SIGMA.replace("sigma ", "spectral_norm "), "--reparam is spectral_norm, was sigma"),
    "tied embeddings": (f"{SIGMA} --share-decoder-input-output-embed", "embed is True, was False"),
    "other strides": (
        f"{CTC} --criterion ctc_with_entropy --conv-strides 3,2 --restore-file ctc/checkpoint_last.pt",
        "--conv-strides is 3,2, was 2,2",
    ),
    "no such start": (f"{TEXT} --restore-file nowhere.pt", "--restore-file nowhere.pt: no such checkpoint"),
    "no such start model": (f"{TEXT} --reparam sigma --reparam-from no.pt", "--reparam-from no.pt: no such file"),
    "CTC model, cross-entropy": (f"{CTC} {CROSS_ENTROPY}", "ctc_with_entropy trains it"),
    "CTC model, fairseq's ctc": (f"{CTC} --criterion ctc", "counts frames before subsampling"),
    "text model, CTC": (TEXT.replace(CROSS_ENTROPY, "--criterion ctc_with_entropy"), "trains an encoder alone"),
    "text model, joint": (
        TEXT.replace(CROSS_ENTROPY, "--criterion label_smoothed_cross_entropy_with_ctc_and_entropy"),
        "SpectralTransformer has no CTC head",
    ),
    "joint without its weight": (
        f"{S2T} --criterion label_smoothed_cross_entropy_with_ctc_and_entropy --ctc-weight 0",
        "needs a CTC head",
    ),
    "CTC model on text": (
        f"fairseq-train bin {PLUGIN} {COMMON} --arch spectral_ctc_transformer_tiny --criterion ctc_with_entropy",
        "SpectralCTCTransformer reads speech, which TranslationTask is not",
    ),
    "text model on speech": (f"{SPEECH} --arch spectral_transformer_tiny {CROSS_ENTROPY}", "reads text, and --task"),
    "CTC checkpoint on text": (f"{GENERATE} ctc/checkpoint_last.pt", "reads speech, which TranslationTask is not"),
    "text checkpoint on speech": (f"{GENERATE_SPEECH} sigma/checkpoint_last.pt", "reads text, and --task"),
    "mixed ensemble": (
        f"{GENERATE_SPEECH} s2t/checkpoint_last.pt:ctc/checkpoint_last.pt",
        "s2t/checkpoint_last.pt is encoder-decoder, ctc/checkpoint_last.pt is CTC",
    ),
    "no beam": (f"{GENERATE} sigma/checkpoint_last.pt --beam 0", "--beam 0: has to be at least 1"),
    "nbest": (f"{GENERATE} sigma/checkpoint_last.pt --nbest 9", "--nbest 9: there are only --beam 5 hypotheses"),
    "negative subsampling": (f"{CTC} --ctc-subsampling -4", "--ctc-subsampling -4: has to be at least 0"),
    "dropout": (f"{TEXT} --dropout 1.5", "--dropout 1.5: has to be at least 0 and at most 1"),
    "no data": (TEXT.replace("bin", "nowhere", 1), "nowhere: no such data folder; .* make demo"),
    "negative rate": (f"{TEXT} --lr -1", "--lr -1.0: has to be at least 0"),
    "no decay": (f"{TEXT} --weight-decay nan", "--weight-decay nan: has to be at least 0"),
    "no micro-batches": (f"{TEXT} --update-freq 0", "--update-freq 0: has to be at least 1"),
    "large seed": (f"{TEXT} --seed 99999999999", "--seed 99999999999: has to be at least 0 and at most 4"),
    "no z-loss": (f"{TEXT} --z-loss nan", "--z-loss nan: has to be at least 0"),
    "no softcap": (f"{TEXT} --attention-softcap inf", "--attention-softcap inf: has to be finite"),
    "one beta": (f"{TEXT} --adam-betas '(0.9)'", r"--adam-betas \(0.9\): give two"),
    "two precisions": (f"{TEXT} --fp16 --bf16", "--fp16 and --bf16: give one of them"),
    "no warm-up": (f"{TEXT} --lr-scheduler inverse_sqrt --warmup-updates 0", "--warmup-updates 0: inverse_sqrt"),
    "no model to finetune": (f"{TEXT} --finetune-from-model no.pt", "--finetune-from-model no.pt does not exist"),
    "language": (f"{TEXT} --source-lang fr", "--source-lang fr: the data are de-en in bin"),
    "no optimizer": (f"{TEXT} --reparam sigma --restore-file averaged.pt", "averaged.pt: no state of an optimizer"),
    "new average": (f"{SIGMA} --store-ema", "checkpoint_last.pt: of a training without --store-ema"),
    "overrides": (f"{GENERATE} sigma/checkpoint_last.pt --model-overrides {{", "--model-overrides {: give a dict"),
    "sharding": (f"{TEXT} --ddp-backend fully_sharded", "fully_sharded is not supported"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line(commands, mistake, request):
    command, message = MISTAKES[mistake]
    folder = "out-" + re.sub(r"\W+", "-", mistake)
    done = commands.run(f"{command} --save-dir {folder}" if "fairseq-train" in command else command)
    assert done.returncode == 1
    assert re.fullmatch(f"error: [^\n]*{message}[^\n]*\n", done.stderr), done.stderr
    assert not list((commands.folder / folder).glob("*.pt"))


def test_a_new_training_may_change_the_function_and_says_so(commands):
    done = commands.run(f"{TEXT} --reparam sigma --norm-placement pre --finetune-from-model sigma/checkpoint_last.pt "
                        "--save-dir tuned")  # fmt: skip
    assert done.returncode in (0, 1)
    assert "--norm-placement is pre, was post" in done.stdout + done.stderr


def test_the_log_names_the_criterion_and_the_checkpoint_its_loss(commands):
    from speech_mt.checkpoint import load_checkpoint

    done = commands.run(f"{TEXT} --reparam sigma --save-dir named")
    assert "criterion: LabelSmoothedCrossEntropyWithEntropy" in done.stdout
    state = load_checkpoint(commands.folder / "named" / "checkpoint_last.pt")
    assert state["optimizer_history"][-1]["criterion_name"] == "LabelSmoothedCrossEntropyCriterion"
    plain = CROSS_ENTROPY.removesuffix("_with_entropy")
    done = commands.run(TEXT.replace(CROSS_ENTROPY, plain) + " --reparam sigma --save-dir named --max-update 2")
    assert done.returncode == 0, done.stderr
    assert "num_updates: 2" in done.stdout


def test_a_metric_that_is_not_measured_costs_no_update(commands):
    validated = TEXT.replace("--disable-validation", "").replace("--max-update 1", "--max-update 2")
    refused = commands.run(f"{validated} --best-checkpoint-metric wer --save-dir metric")
    assert refused.returncode == 1
    message = "error: --best-checkpoint-metric wer is not measured in validation, but loss, .* are; 2 updates are saved"
    assert re.fullmatch(f"{message}[^\n]*\n", refused.stderr), refused.stderr
    done = commands.run(f"{validated} --max-update 3 --save-dir metric")
    assert "@ 2 updates" in done.stdout


def test_a_finished_training_is_left_as_it_is(commands):
    before = (commands.folder / "sigma" / "checkpoint_last.pt").read_bytes()
    done = commands.run(f"{TEXT} --reparam sigma --save-dir sigma")
    assert done.returncode == 0, done.stderr
    assert "nothing to train: 1 updates are done, of --max-update 1" in done.stdout
    assert (commands.folder / "sigma" / "checkpoint_last.pt").read_bytes() == before


def test_results_stay_until_new_ones_are_whole(commands):
    command = f"{GENERATE} sigma/checkpoint_last.pt --max-len-b 5 --results-path results"
    assert commands.run(command).returncode == 0
    results = commands.folder / "results" / "generate-test.txt"
    before = results.read_text()
    assert "Generate test with beam=5" in before
    assert [path.name for path in results.parent.iterdir()] == [results.name]
    assert commands.run(f"{command} --max-len-b 0").returncode == 1
    assert results.read_text() == before


def test_one_language_gives_the_direction(commands):
    done = commands.run(f"{TEXT} --source-lang en --no-save")
    assert done.returncode == 0, done.stderr
    assert "en-de" in done.stdout


@pytest.mark.parametrize("command", [f"{GENERATE} sigma/checkpoint_last.pt --max-len-b 5"])
def test_a_reader_that_has_seen_enough_is_no_error(commands, command):
    run = subprocess.run(
        f"'{BIN}'/{command} --user-dir '{REPOSITORY}/user_dir' | head -n 1",
        shell=True, cwd=commands.folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Error" not in run.stderr, run.stderr
