"""The controls of oversmoothing and their rivals, as options of fairseq-train and as an image encoder."""

from __future__ import annotations

from dataclasses import dataclass

from speech_mt.models.image_encoder import ImageClassifier, vit_tiny
from speech_mt.modules.token_mixing import token_mixings
from speech_mt.reparam import sigma_reparam


@dataclass(frozen=True)
class Control:
    """What a model has that the stock one has not; all are pre-LN but for those that say otherwise."""

    spectrum: str = "free"
    basis: str = "orthogonal"
    mixing: str = ""
    reparam: str = "none"
    placement: str = "pre"

    @property
    def options(self) -> str:
        """For fairseq-train."""
        values = {
            "--norm-placement": self.placement,
            "--reparam": self.reparam,
            "--value-spectrum": self.spectrum,
            "--value-basis": self.basis,
            "--token-mixing": self.mixing,
        }
        defaults = {"none", "free", "orthogonal", ""}
        return " ".join(f"{option} {value}" for option, value in values.items() if value not in defaults)

    def image_classifier(self, layers: int, **image: int) -> ImageClassifier:
        """A ViT-Ti with it; ``image`` as :class:`ImageClassifier`'s classes, sizes and channels."""
        mixing = {"token_mixing": token_mixings(self.mixing), "neutreno_lambda": 0.6}
        shape = vit_tiny(layers, norm_placement=self.placement, **mixing)
        model = ImageClassifier(spectrum=self.spectrum, basis=self.basis, shape=shape, **image)
        if self.reparam == "sigma":
            sigma_reparam(model.encoder, include=r"^layers\.")
        return model


# + smooth, - sharpen, * sharpen the first half, as the paper calls them
CONTROLS = {
    "stock": Control(),
    "smooth": Control("smooth"),
    "sharpen": Control("sharpen"),
    "sharpen first half": Control("sharpen-first-half"),
    "smooth (general)": Control("smooth", "general"),
    "sharpen (general)": Control("sharpen", "general"),
    "sharpen first half (general)": Control("sharpen-first-half", "general"),
    "AttnScale": Control(mixing="attn_scale"),
    "FeatScale": Control(mixing="feat_scale"),
    "NeuTRENO": Control(mixing="neutreno"),
    "FeatScale + NeuTRENO": Control(mixing="feat_scale,neutreno"),
    "sigmaReparam": Control(reparam="sigma"),
    "DeepNorm": Control(placement="deepnorm"),
}
