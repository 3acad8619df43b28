"""A folded checkpoint is stock fairseq's, with the same outputs; what does not fold is named."""

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from fairseq.models.transformer import TransformerConfig, TransformerModelBase

from speech_mt.checkpoint.folding import fold_checkpoint
from speech_mt.errors import InputError
from speech_mt.models.config import SpectralTransformerConfig
from speech_mt.reparam import fold_state_dict, reestimate_state_dict, states

from .conftest import SIZES


def checkpoint(model, **options):
    """What fairseq would save of the model, as plain values."""
    sizes = SIZES | {"decoder_layers": 3, "max_target_positions": 200}
    model_cfg = asdict(SpectralTransformerConfig(**(sizes | options))) | {"_name": "spectral_transformer"}
    return {
        "model": model.state_dict(),
        "cfg": {
            "model": model_cfg,
            "common": {"user_dir": "user_dir", "seed": 1},
            "criterion": {"_name": "label_smoothed_cross_entropy_with_entropy", "monitor": "entropy", "z_loss": 0.0},
        },
        "last_optimizer_state": {},
    }


def trained(model, batch):
    """A few updates, so that gamma, u and the weights have moved."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for update in range(3):
        model.set_num_updates(update)
        optimizer.zero_grad()
        scores = model(**batch["net_input"])[0]
        torch.nn.functional.cross_entropy(scores.flatten(0, 1), batch["target"].flatten(), ignore_index=1).backward()
        optimizer.step()
    return model.eval()


def stock(model_cfg, task):
    return TransformerModelBase.build_model(TransformerConfig.from_namespace(SimpleNamespace(**model_cfg)), task).eval()


@pytest.mark.parametrize("placement", ["post", "pre", "deepnorm", "admin"])
@pytest.mark.parametrize("reparam", ["none", "sigma", "spectral_norm", "weight_norm"])
def test_stock_fairseq_computes_the_same(text_model, text_batch, task, placement, reparam):
    options = {"norm_placement": placement, "reparam": reparam, "share_all_embeddings": True}
    model = trained(text_model(**options), text_batch)
    folded, reasons = fold_checkpoint(checkpoint(model, **options))
    assert reasons == []
    plain = stock(folded["cfg"]["model"], task)
    plain.load_state_dict(folded["model"])
    real = text_batch["target"] != 1
    tolerance = 1e-4 if placement in ("deepnorm", "admin") else 1e-5
    torch.testing.assert_close(
        plain(**text_batch["net_input"])[0][real],
        model(**text_batch["net_input"])[0][real],
        rtol=tolerance,
        atol=tolerance,
    )
    assert folded["cfg"]["common"] == {"user_dir": None, "seed": 1}
    assert folded["cfg"]["criterion"] == {"_name": "label_smoothed_cross_entropy"}
    assert "last_optimizer_state" not in folded


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"norm_placement": "none"}, "--norm-placement none"),
        ({"norm_placement": "subln"}, "--norm-placement subln"),
        ({"norm_placement": "sandwich"}, "--norm-placement sandwich"),
        ({"qk_norm": True}, "--qk-norm"),
        ({"attention_softcap": 5.0}, "--attention-softcap"),
    ],
)
def test_what_does_not_fold_is_named_and_only_the_reparametrisation_goes(text_model, text_batch, options, reason):
    options = options | {"reparam": "sigma"}
    model = trained(text_model(**options), text_batch)
    folded, reasons = fold_checkpoint(checkpoint(model, **options))
    assert len(reasons) == 1
    assert reason in reasons[0]
    assert folded["cfg"]["model"]["reparam"] == "none"
    plain = text_model(**(options | {"reparam": "none"})).eval()
    plain.load_state_dict(folded["model"])
    assert torch.equal(plain(**text_batch["net_input"])[0], model(**text_batch["net_input"])[0])


def test_softplus_gamma_folds_as_such(text_model, text_batch):
    options = {"reparam": "sigma", "reparam_positive_gamma": True}
    model = trained(text_model(**options), text_batch)
    folded, _ = fold_checkpoint(checkpoint(model, **options))
    with torch.no_grad():
        assert torch.equal(folded["model"]["encoder.layers.0.fc1.weight"], model.encoder.layers[0].fc1.weight)


def test_a_stock_checkpoint_has_nothing_to_fold():
    with pytest.raises(InputError, match="'transformer' is not one of speech_mt's"):
        fold_checkpoint({"model": {}, "cfg": {"model": {"_name": "transformer"}}})


def test_reestimated_state_of_averaged_weights_has_norm_gamma(text_model):
    """The mean of unit u and v is no unit vector and belongs to no weight: the norm must be |gamma| all the same."""
    one, other = text_model(reparam="sigma"), text_model(reparam="sigma")
    for parameter in other.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.2)
    mean = {
        key: (value + other.state_dict()[key]) / 2 if value.is_floating_point() else value
        for key, value in one.state_dict().items()
    }
    folded = fold_state_dict(reestimate_state_dict(mean))
    for name, state in states(one):
        gammas = mean[f"{name}.sigma_reparam.gamma"].abs()
        weights = [key for key in folded if key.startswith(name + ".") and key.endswith(("proj.weight", "fc1.weight"))]
        for key in weights:
            norm = torch.linalg.matrix_norm(folded[key], 2)
            assert (norm - gammas).abs().min() < 1e-2, (key, norm, gammas)
        assert len(weights) == len(state.rows) - 1


def test_start_from_a_stock_checkpoint_is_the_same_function(text_model, stock_model, text_batch, tmp_path):
    plain = stock_model()
    path = tmp_path / "stock.pt"
    torch.save({"model": plain.state_dict(), "cfg": {}}, path)
    for parameter in plain.parameters():
        parameter.data.mul_(1.5)
    torch.save({"model": plain.state_dict(), "cfg": {}}, path)
    ours = text_model(reparam="sigma", reparam_from=str(path)).eval()
    real = text_batch["target"] != 1
    torch.testing.assert_close(
        ours(**text_batch["net_input"])[0][real], plain.eval()(**text_batch["net_input"])[0][real], rtol=1e-4, atol=1e-4
    )


def test_a_missing_start_is_an_error_of_training_and_not_of_decoding(text_model):
    model = text_model(reparam="sigma", reparam_from="nowhere.pt")
    with pytest.raises(InputError, match="--reparam-from nowhere.pt: no such file"):
        model.check_start()
    model.load_state_dict(model.state_dict())
    model.check_start()


def test_a_start_of_another_depth_is_explained(text_model, tmp_path):
    path = tmp_path / "shallow.pt"
    torch.save({"model": text_model(encoder_layers=2).state_dict(), "cfg": {}}, path)
    with pytest.raises(InputError, match="encoder.layers: the model has 3, the checkpoint 2"):
        text_model(reparam="sigma", reparam_from=str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reparam": "sigma", "qk_clip": 100.0}, "--qk-clip shrinks W, which has no effect under --reparam sigma"),
        ({"reparam_gamma_init": "spectral"}, "--reparam-gamma-init belongs to --reparam sigma, not none"),
        ({"reparam": "weight_norm", "reparam_positive_gamma": True}, "--reparam-positive-gamma belongs to"),
    ],
)
def test_options_that_contradict_each_other_are_refused(text_model, options, message):
    with pytest.raises(InputError, match=message):
        text_model(**options)
