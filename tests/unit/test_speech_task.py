"""The task in fairseq's terms: options, splits, what is left out, words, generators and the error rate."""

import logging
from argparse import Namespace

import numpy as np
import pytest
import soundfile
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf

from speech_mt.data.manifest import read_manifest, write_manifest
from speech_mt.data.specaugment import POLICIES, apply_masks
from speech_mt.data.vocabulary import (
    character_counts,
    load_sentencepiece,
    sentencepiece_counts,
    train_sentencepiece,
    write_dictionary,
)
from speech_mt.decoding.ctc_generator import CTCGenerator
from speech_mt.decoding.ctc_prefix_beam import PrefixBeamSearch
from speech_mt.decoding.ctc_rescoring import CTCRescoringGenerator
from speech_mt.errors import InputError
from speech_mt.tasks.speech import SpeechManifestTask
from speech_mt.tasks.speech_config import SpeechManifestConfig

TEXTS = {"train": ["a cab", "bad", "ca b"], "valid": ["a b", "cab"]}


def write_split(folder, split, texts, samples=8000):
    rows = []
    for k, text in enumerate(texts):
        soundfile.write(
            folder / f"{split}{k}.wav", np.random.default_rng(k).uniform(-0.5, 0.5, samples), 16000
        )
        row = {"id": f"{split}-{k}", "audio": f"{split}{k}.wav", "duration": samples / 16000}
        rows.append(row | {"text": text, "speaker": "s"})
    write_manifest(folder / f"{split}.tsv", rows)


@pytest.fixture
def folder(tmp_path):
    for split, texts in TEXTS.items():
        write_split(tmp_path, split, texts)
    write_dictionary(tmp_path / "dict.txt", character_counts(TEXTS["train"]))
    return tmp_path


def task(folder, **changes):
    resolved = {"seed": 1, "train_subset": "train", "post_process": None}  # what fairseq interpolates
    cfg = OmegaConf.structured(SpeechManifestConfig(data=str(folder)))
    return SpeechManifestTask.setup_task(OmegaConf.merge(cfg, resolved, changes))


def test_every_option_reaches_the_task_from_the_command_line(folder):
    flags = {
        "lowercase": True,
        "sample_rate": 8000,
        "resample": True,
        "num_mel_bins": 40,
        "features_normalization": "per_bin",
        "specaugment": "lb",
        "specaugment_start_update": 9,
        "speed_perturb": "0.9,1.1",
        "max_source_positions": 7,
        "max_target_positions": 8,
        "ctc_subsampling": 3,
        "eval_wer": True,
        "ctc_beam": 16,
        "ctc_lm": "words.arpa",
        "ctc_lm_weight": 0.7,
        "ctc_word_bonus": 0.1,
        "ctc_rescore_weight": 0.2,
        "vocab_type": "sentencepiece",
        "seed": 5,
        "train_subset": "other",
    }
    arguments = [
        str(folder),
        "--task",
        "speech_manifest",
        "--arch",
        "s2t_transformer_s",
        "--optimizer",
        "sgd",
    ]
    for name, value in flags.items():
        arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    parsed = options.parse_args_and_arch(options.get_training_parser(), arguments + ["--lr", "1"])
    cfg = convert_namespace_to_omegaconf(parsed).task
    assert {name: getattr(cfg, name) for name in flags} == flags
    assert cfg.data == str(folder)


def test_missing_files_are_named_with_the_way_to_make_them(folder):
    with pytest.raises(InputError, match="nowhere: no such data folder"):
        task(folder / "nowhere")
    with pytest.raises(
        InputError, match=r"spm\.model: no such file; make it by .*--vocab-type sentencepiece"
    ):
        task(folder, vocab_type="sentencepiece")
    with pytest.raises(InputError, match=r"test\.tsv: no such manifest; splits found in .*: train, valid"):
        task(folder).load_dataset("test")
    (folder / "dict.txt").write_text("no count\n")
    with pytest.raises(InputError, match=r"dict\.txt: not a fairseq dictionary"):
        task(folder)
    (folder / "dict.txt").unlink()
    with pytest.raises(
        InputError, match=r"dict\.txt: no such file; make it by .*train\.tsv --vocab-type char"
    ):
        task(folder)


def test_only_training_shuffles_and_masks(folder):
    speech = task(folder, specaugment="ld")
    for split, kwargs, training in [
        ("train", {}, True),
        ("valid", {}, False),
        ("train", {"task_cfg": speech.cfg}, False),  # as when a checkpoint is decoded on its training data
    ]:
        speech.load_dataset(split, **kwargs)
        assert speech.dataset(split).training is training
        assert ("masks" in speech.dataset(split)[0]) is training
    assert speech.dataset("valid").specaugment is POLICIES["ld"]


class Recorder(torch.nn.Module):
    """A criterion that keeps the features it is given."""

    def forward(self, model, sample):
        self.seen = sample["net_input"]["src_tokens"]
        return torch.zeros((), requires_grad=True), 1, {}


def test_specaugment_begins_at_its_update(folder):
    speech = task(folder, specaugment="ld", specaugment_start_update=3)
    speech.load_dataset("train")
    data = speech.dataset("train")
    batch = data.collater([data[0], data[1]])
    clean = batch["net_input"]["src_tokens"].clone()
    recorder, optimizer = Recorder(), Namespace(backward=lambda loss: None)
    model = Namespace(train=lambda: None, set_num_updates=lambda n: None)
    for update in range(5):
        speech.train_step(batch, model, recorder, optimizer, update)
        assert torch.equal(recorder.seen, clean) == (update < 3)
        assert torch.equal(batch["net_input"]["src_tokens"], clean)  # the batch is left as it is
    assert torch.equal(recorder.seen, apply_masks(clean, *batch["masks"]))


def test_a_resumed_run_has_the_batches_of_the_uninterrupted_one(folder):
    write_split(folder, "train", ["a cab"] * 12, samples=1600)

    def batches(first_epoch):
        speech = task(folder)
        speech.load_dataset("train")
        found = []
        for epoch in range(first_epoch, 4):
            iterator = speech.get_batch_iterator(speech.dataset("train"), max_tokens=30, seed=1, epoch=epoch)
            found.append([batch["id"].tolist() for batch in iterator.next_epoch_itr(shuffle=True)])
        return found

    straight = batches(1)
    assert batches(2) == straight[1:]
    assert len({str(epoch) for epoch in straight}) == 3


@pytest.mark.parametrize("text", ["0.9;1.1", "fast", "0.2", "1,,1"])
def test_speeds_that_are_none(folder, text):
    with pytest.raises(InputError, match=r"--speed-perturb .*: give speeds from 0\.5 to 2"):
        task(folder, speed_perturb=text).load_dataset("train")


def test_blank_is_the_first_symbol_and_no_target_has_it(folder):
    speech = task(folder)
    speech.load_dataset("train")
    assert speech.target_dictionary.bos() == 0
    assert speech.source_dictionary is None
    for k, text in enumerate(TEXTS["train"]):
        target = speech.dataset("train")[k]["target"]
        assert 0 not in target
        assert " ".join(speech.words(target)) == text


def test_unknown_characters_stop_training_and_are_reported_elsewhere(folder, caplog):
    write_split(folder, "train", ["a cab", "fée", "deed"])
    speech = task(folder)
    with pytest.raises(InputError, match=r"train\.tsv: 2 of 3 transcripts hold .*'e'.*'é'.*'train-1'"):
        speech.load_dataset("train")
    write_split(folder, "valid", ["a cab", "xa"])
    with caplog.at_level(logging.WARNING):
        speech.load_dataset("valid")
    (record,) = caplog.records
    assert (
        "1 of 2 transcripts hold characters that dict.txt lacks ('x'), first utterance 'valid-1'"
        in record.message
    )
    unknown = speech.dataset("valid")[1]["target"]
    assert speech.words(unknown, escape_unk=True) != speech.words(unknown)  # never a match in the error rate


def test_what_is_left_out_is_named(folder, caplog):
    write_split(folder, "train", ["a", "", "b" * 50])
    speech = task(folder, ctc_subsampling=4)
    speech.load_dataset("train")
    with caplog.at_level(logging.WARNING):
        kept = speech.filter_indices_by_size(np.arange(3), speech.dataset("train"), None, True)
    assert kept.tolist() == [0]
    assert [record.message.split("train.tsv: ")[1] for record in caplog.records] == [
        "1 of 3 utterances have no transcript: train-1; skipped",
        "1 of 3 utterances have fewer encoder frames than CTC needs: train-2; skipped",
    ]


def test_validation_loses_nothing_silently(folder, caplog):
    speech = task(folder)
    speech.load_dataset("valid")
    data = speech.dataset("valid")
    with pytest.raises(
        InputError, match="2 of 2 utterances have more than 40 frames: valid-0, valid-1; raise"
    ):
        speech.filter_indices_by_size(np.arange(2), data, (40, 100))
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(InputError, match=r"valid\.tsv: no utterance is left"),
    ):
        speech.filter_indices_by_size(np.arange(2), data, (40, 100), ignore_invalid_inputs=True)
    assert "valid-0, valid-1; skipped" in caplog.text


def test_no_limit_helps_an_utterance_shorter_than_a_window(folder):
    speech = task(folder)
    speech.load_dataset("valid")
    data = speech.dataset("valid")
    data.frames = np.array([0, 48])
    with pytest.raises(
        InputError, match=r"have less audio than one window of 25 ms: valid-0; remove them from the manifest, or skip"
    ):
        speech.filter_indices_by_size(np.arange(2), data, (4000, 100))


def test_printed_units_become_words(folder):
    assert task(folder).build_bpe(None).decode("a | c a b") == "a cab"
    assert task(folder, post_process="letter").build_bpe(None).decode("a cab") == "a cab"  # words already
    train_sentencepiece(TEXTS["train"] * 9, folder / "spm.model", vocab_size=13)
    model = load_sentencepiece(folder / "spm.model")
    write_dictionary(folder / "dict.txt", sentencepiece_counts(TEXTS["train"], model))
    speech = task(folder, vocab_type="sentencepiece")
    speech.load_dataset("train")
    units = speech.dictionary.string(speech.dataset("train")[0]["target"])
    assert units != "a cab"
    assert speech.build_bpe(None).decode(units) == "a cab"
    assert speech.build_bpe(Namespace(bpe="characters")).decode("a b \u2581 c") == "ab c"  # --bpe is obeyed


def test_interactive_input_is_paths(folder):
    speech = task(folder)
    lines = [str(folder / "valid1.wav"), str(folder / "train0.wav")]
    data = speech.build_dataset_for_inference(
        *speech.get_interactive_tokens_and_lengths(lines, None), constraints=None
    )
    speech.load_dataset("valid")
    assert torch.equal(data[0]["source"], speech.dataset("valid")[1]["source"])
    assert data.collater([data[0], data[1]])["net_input"]["src_lengths"].tolist() == [48, 48]
    with pytest.raises(InputError, match=r"none\.wav: no such audio file"):
        speech.get_interactive_tokens_and_lengths([str(folder / "none.wav")], None)


class CTCModel(torch.nn.Module):
    """Says the same ids whatever it hears: blank, id, blank, id, ..."""

    def __init__(self, ids, symbols):
        super().__init__()
        frames = torch.tensor([unit for k in ids for unit in (0, k)])
        self.logits = 20.0 * torch.nn.functional.one_hot(frames, symbols)

    def forward(self, src_tokens, src_lengths, prev_output_tokens=None):
        return {"encoder_out": self.logits[:, None].expand(-1, len(src_tokens), -1), "padding_mask": None}

    def get_normalized_probs(self, net_output, log_probs):
        return net_output["encoder_out"].log_softmax(-1)


class Criterion(torch.nn.Module):
    def forward(self, model, sample):
        return torch.zeros(()), 1, {"ntokens": sample["ntokens"], "nsentences": sample["nsentences"]}

    @staticmethod
    def reduce_metrics(logging_outputs):
        pass


def test_word_error_rate_of_a_ctc_model(folder):
    speech = task(folder)
    write_split(folder, "valid", ["a b", "cab", "a cab", ""])
    speech.load_dataset("valid")
    data = speech.dataset("valid")
    ids = [speech.dictionary.index(symbol) for symbol in "a|cab"]
    model = CTCModel(ids, len(speech.dictionary))  # always "a cab"
    speech.wer_generator = speech.build_generator([model], Namespace())
    logs = []
    for rows in ([0, 1], [2], [3]):
        batch = data.collater([data[k] for k in rows])
        logs.append(speech.valid_step(batch, model, Criterion())[2])
    # a b: one substitution; cab: one insertion; a cab: right; no words: two insertions
    assert [(log["wer_errors"], log["wer_words"]) for log in logs] == [(2, 3), (0, 2), (2, 0)]
    for groups in ([logs], [logs[:1], logs[1:]], [[log] for log in logs]):  # however the batches are reduced
        with metrics.aggregate(new_root=True) as aggregator:
            for group in groups:
                speech.reduce_metrics(group, Criterion())
        assert aggregator.get_smoothed_values()["wer"] == pytest.approx(80.0)


def test_training_logs_no_error_rate(folder):
    with metrics.aggregate(new_root=True) as aggregator:
        task(folder).reduce_metrics([{"ntokens": 3, "nsentences": 1}], Criterion())
    assert "wer" not in aggregator.get_smoothed_values()


def test_ctc_models_are_decoded_greedily(folder):
    speech = task(folder)
    extra = {"lm_model": None, "lm_weight": 0.0}  # as fairseq-generate passes them
    generator = speech.build_generator([CTCModel([4], 9)], Namespace(beam=5), extra_gen_cls_kwargs=extra)
    assert isinstance(generator, CTCGenerator)
    assert generator.decode.keywords == {"blank": 0}
    assert generator.symbols_to_strip_from_output == {1, 2}
    with pytest.raises(InputError, match="takes no neural language model"):
        speech.build_generator(
            [CTCModel([4], 9)], Namespace(), extra_gen_cls_kwargs={"lm_model": Criterion()}
        )


def test_ctc_models_are_decoded_by_prefix_beam_search_if_asked(folder):
    ids = [4, 5, 5]
    generator = task(folder, ctc_beam=7).build_generator([CTCModel(ids, 9)], Namespace(nbest=2))
    assert isinstance(generator.decode, PrefixBeamSearch)
    assert (generator.decode.beam, generator.decode.nbest, generator.decode.blank) == (7, 2, 0)
    ((best, _),) = generator.generate([CTCModel(ids, 9)], {"net_input": {"src_tokens": [0], "src_lengths": [0]}})
    assert best["tokens"].tolist() == ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ctc_lm": "words.arpa"}, "add --ctc-beam"),
        ({"ctc_beam": -1}, "--ctc-beam -1: has to be at least 0"),
        ({"ctc_lm_weight": 0.7}, r"--ctc-lm-weight 0\.7 belongs to --ctc-lm"),
        ({"ctc_word_bonus": -1.0, "ctc_beam": 4}, r"--ctc-word-bonus -1\.0 belongs to --ctc-lm"),
        ({"ctc_rescore_weight": 0.3}, "for encoder-decoders; this model is CTC alone"),
    ],
)
def test_decoding_options_without_effect_are_refused(folder, options, message):
    with pytest.raises(InputError, match=message):
        task(folder, **options).build_generator([CTCModel([4], 9)], Namespace())


class TestModelsWithDecoder:
    """fairseq's own small speech-to-text transformer under the task."""

    @pytest.fixture
    def speech(self, folder):
        return task(folder, eval_wer=True, num_mel_bins=40)

    @pytest.fixture
    def model(self, speech):
        sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_embed_dim": 16, "decoder_embed_dim": 16}
        sizes |= {"encoder_ffn_embed_dim": 16, "decoder_ffn_embed_dim": 16, "conv_channels": 16}
        names = {"arch": "s2t_transformer_s", "_name": "s2t_transformer_s"}
        limits = {"max_source_positions": 6000, "max_target_positions": 1024}
        torch.manual_seed(1)
        return speech.build_model(Namespace(**names, **sizes, **limits)).eval()

    def test_validation_decodes(self, speech, model):
        speech.load_dataset("valid")
        data = speech.dataset("valid")
        _, _, log = speech.valid_step(data.collater([data[0], data[1]]), model, Criterion())
        assert log["wer_words"] == 3
        assert log["wer_errors"] > 0

    @pytest.mark.parametrize(
        ("options", "limits"),
        [
            ({"max_len_a": 0, "max_len_b": 200}, (0.25, 200)),
            ({"max_len_a": 0, "max_len_b": 50}, (0, 50)),
            ({"max_len_a": 1, "max_len_b": 200}, (1, 200)),
        ],
    )
    def test_characters_get_room_unless_limited(self, speech, model, options, limits):
        generator = speech.build_generator([model], OmegaConf.create({"beam": 2} | options))
        assert isinstance(generator, SequenceGenerator)
        assert (generator.max_len_a, generator.max_len_b) == limits
        assert generator.beam_size == 2

    def test_ctc_rescores_the_beam_if_asked(self, folder, model):
        generator = task(folder, ctc_rescore_weight=0.3).build_generator([model], OmegaConf.create({"beam": 2}))
        assert isinstance(generator, CTCRescoringGenerator)
        assert (generator.weight, generator.blank) == (0.3, 0)
        with pytest.raises(InputError, match="this one has a decoder"):
            task(folder, ctc_beam=4).build_generator([model], Namespace())
        with pytest.raises(InputError, match=r"--ctc-rescore-weight 1\.3: has to be at least 0 and at most 1"):
            task(folder, ctc_rescore_weight=1.3).build_generator([model], Namespace())


def test_the_manifest_rows_are_the_sample_ids(folder):
    speech = task(folder)
    speech.load_dataset("valid")
    batch = speech.dataset("valid").collater([speech.dataset("valid")[1]])
    assert read_manifest(folder / "valid.tsv").field(batch["id"].item(), "id") == "valid-1"
