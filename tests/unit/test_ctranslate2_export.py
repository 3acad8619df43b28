"""CTranslate2 computes what fairseq computes, for every placement that folds."""

import json

import pytest
import torch

from speech_mt.checkpoint.ctranslate2_export import export_ctranslate2, languages
from speech_mt.decoding.agreement import TIE, compare_decoders
from speech_mt.errors import InputError

from .test_folding import checkpoint

ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install 'speech_mt[deploy]'")

METHODS = {
    "post-LN": {},
    "pre-LN": {"norm_placement": "pre"},
    "DeepNorm": {"norm_placement": "deepnorm"},
    "sigmaReparam": {"reparam": "sigma", "share_all_embeddings": True},
    "value spectrum": {"norm_placement": "pre", "value_spectrum": "sharpen"},
    "DeepNorm + sigmaReparam": {"norm_placement": "deepnorm", "reparam": "sigma", "reparam_gamma_init": "spectral"},
}
END, PAD = 2, 1


@pytest.fixture
def data(dictionary, tmp_path):
    """The dictionaries that fairseq-preprocess leaves."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for language in ("de", "en"):
        dictionary.save(str(folder / f"dict.{language}.txt"))
    return folder


def sentences(count, seed):
    """Token ids of 2 to 8 words and the end of the sentence."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
    return [torch.cat([torch.randint(4, 44, (n,), generator=generator), torch.tensor([END])]) for n in lengths]


def trained_to_end(model):
    """A few updates on a task that teaches when to stop: repeat the source."""
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    sources = sentences(32, seed=0)
    longest = max(map(len, sources))
    target = torch.stack([torch.nn.functional.pad(s, (0, longest - len(s)), value=PAD) for s in sources])
    source = torch.stack([torch.nn.functional.pad(s, (longest - len(s), 0), value=PAD) for s in sources])
    previous = torch.cat([torch.full((len(sources), 1), END), target[:, :-1]], 1)
    for update in range(25):
        model.set_num_updates(update)
        optimizer.zero_grad()
        scores = model(source, torch.tensor([len(s) for s in sources]), previous)[0]
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten(), ignore_index=PAD).backward()
        optimizer.step()
    return model.eval()


def saved(model, **options):
    state = checkpoint(model, **options)
    state["cfg"]["task"] = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
    return state


@pytest.mark.parametrize("method", METHODS)
def test_both_decoders_agree(text_model, dictionary, data, tmp_path, method):
    """Hypotheses that end: fairseq scores the end of one that is cut at the limit, CTranslate2 does not."""
    model = trained_to_end(text_model(**METHODS[method]))
    export_ctranslate2(saved(model, **METHODS[method]), data, tmp_path / "out")
    translator = ctranslate2.Translator(str(tmp_path / "out"))
    sources = sentences(20, seed=1)
    for beam in (1, 3):
        found = compare_decoders(model, dictionary, translator, sources, dictionary, beam=beam, max_length=60)
        assert [one for one in found if abs(one.margin) > TIE and len(one.ours) < 60] == []


def test_padding_can_be_ruled_out_as_fairseq_does(text_model, data, tmp_path):
    """Even of a model that finds it most probable."""
    model = text_model().eval()
    with torch.no_grad():
        norm, words = model.decoder.layers[-1].final_layer_norm, model.decoder.output_projection.weight
        norm.weight.zero_()
        norm.bias.fill_(1.0)  # every position has the same features
        words.zero_()
        words[PAD], words[7] = 2.0, 1.0
    export_ctranslate2(saved(model), data, tmp_path / "out")
    translator = ctranslate2.Translator(str(tmp_path / "out"))
    results = [
        translator.translate_batch([["w1"]], max_decoding_length=3, suppress_sequences=suppressed)[0].hypotheses
        for suppressed in (None, [["<blank>"]])
    ]
    assert results == [[["<blank>"] * 3], [["w3"] * 3]]


def test_a_disagreement_says_where_and_by_how_much(text_model, dictionary, data, tmp_path):
    model = trained_to_end(text_model())
    other = saved(model)
    other["model"] = {key: value.clone() for key, value in other["model"].items()}
    other["model"]["decoder.output_projection.weight"][7:20] *= 2
    export_ctranslate2(other, data, tmp_path / "out")
    translator = ctranslate2.Translator(str(tmp_path / "out"))
    found = compare_decoders(model, dictionary, translator, sentences(20, seed=1), dictionary, max_length=60)
    assert found
    for one in found:
        assert one.ours[: one.position] == one.theirs[: one.position]
        assert one.ours[one.position : one.position + 1] != one.theirs[one.position : one.position + 1]
        assert one.margin > TIE  # greedy search chose the more probable word


def test_int8_is_smaller(text_model, data, tmp_path):
    state = saved(text_model())
    for quantization in ("float32", "int8"):
        export_ctranslate2(state, data, tmp_path / quantization, quantization)
    sizes = [(tmp_path / name / "model.bin").stat().st_size for name in ("float32", "int8")]
    assert sizes[1] < 0.5 * sizes[0]
    assert json.loads((tmp_path / "int8" / "config.json").read_text())["add_source_eos"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"norm_placement": "subln"}, "no --norm-placement subln"), ({"qk_norm": True}, "--qk-norm")],
)
def test_what_does_not_fold_is_named(text_model, data, tmp_path, options, reason):
    with pytest.raises(InputError, match=reason):
        export_ctranslate2(saved(text_model(**options), **options), data, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_kept_and_dictionaries_are_needed(text_model, data, tmp_path):
    state = saved(text_model())
    with pytest.raises(InputError, match="bin exists: give another folder, or --force"):
        export_ctranslate2(state, data, data)
    with pytest.raises(InputError, match=r"dict\.de\.txt: no such dictionary"):
        export_ctranslate2(state, tmp_path, tmp_path / "out")


def test_force_replaces_an_earlier_export_and_keeps_its_sentencepiece_model(text_model, data, tmp_path):
    state, out = saved(text_model()), tmp_path / "out"
    export_ctranslate2(state, data, out)
    (out / "spm.model").write_text("pieces")
    size = (out / "model.bin").stat().st_size
    export_ctranslate2(state, data, out, "int8", force=True)
    assert (out / "model.bin").stat().st_size < 0.5 * size
    assert (out / "spm.model").read_text() == "pieces"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "out"]  # nothing is left beside it


@pytest.mark.parametrize("name", ["checkpoint_last.pt", "notes/today.txt", "old_vocabulary/dict.txt"])
def test_force_does_not_delete_what_no_export_wrote(text_model, data, tmp_path, name):
    out = tmp_path / "out"
    export_ctranslate2(saved(text_model()), data, out)
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    with pytest.raises(InputError, match=rf"out holds what no export wrote \({name.partition('/')[0]}\)"):
        export_ctranslate2(saved(text_model()), data, out, force=True)
    assert (out / name).read_text() == "mine"


def test_an_export_that_fails_leaves_the_earlier_one(text_model, data, tmp_path):
    state, out = saved(text_model()), tmp_path / "out"
    export_ctranslate2(state, data, out)
    before = (out / "model.bin").read_bytes()
    del state["model"]["encoder.embed_tokens.weight"]
    with pytest.raises(Exception, match="embed_tokens"):
        export_ctranslate2(state, data, out, force=True)
    assert (out / "model.bin").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bin", "out"]


def test_a_missing_subset_is_noticed_before_the_export(text_model, data, tmp_path):
    (data / "valid.de-en.de.idx").touch()
    with pytest.raises(InputError, match=r"bin/nope\.de-en\.de\.idx: no such file: give another --subset"):
        export_ctranslate2(saved(text_model()), data, tmp_path / "out", subset="nope")
    assert not (tmp_path / "out").exists()
    export_ctranslate2(saved(text_model()), data, tmp_path / "out", subset="valid")


def test_a_speech_model_is_refused_for_what_it_is(s2t_model, tmp_path):
    """Though there are no two languages in its data either."""
    state = checkpoint(s2t_model())
    state["cfg"]["model"]["_name"] = "spectral_s2t_transformer"
    with pytest.raises(InputError, match="reads features that no stock task makes"):
        export_ctranslate2(state, tmp_path, tmp_path / "out")


def test_languages_are_found_in_the_data(data):
    (data / "train.de-en.de.idx").touch()
    assert languages({"cfg": {"task": {"source_lang": None}}}, data) == ("de", "en")
    (data / "train.en-fr.fr.idx").touch()
    with pytest.raises(InputError, match="2 language pairs in it"):
        languages({}, data)
