"""What does not go together ends in one line that names it, before anything is trained, and leaves nothing behind."""

import re

import numpy as np
import pytest
import soundfile

from speech_mt.data.manifest import write_manifest

from .commands import Commands
from .conftest import PLUGIN, REPOSITORY, write_corpus

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
