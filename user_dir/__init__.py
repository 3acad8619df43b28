"""What the plugin adds to fairseq: ``--user-dir user_dir``."""

# isort: skip_file
# ruff: noqa: E402, F401

from speech_mt import compat

compat.apply()  # fairseq on current Python and torch; first, for the rest imports fairseq

# models                                                       --arch
from speech_mt.models.text_to_text import SpectralTransformer  # spectral_transformer, _{6,18,50,100}l, _tiny
from speech_mt.models.speech_to_text import SpectralS2TTransformer  # spectral_s2t_transformer, _{s,m,l}, _tiny
from speech_mt.models.speech_ctc import SpectralCTCTransformer  # spectral_ctc_transformer, _36l, _tiny
from speech_mt.models.masked_lm import SpectralMaskedLM  # spectral_masked_lm, _tiny

# criterions                                                                 --criterion
from speech_mt.criterions.monitored import (
    LabelSmoothedCrossEntropyWithEntropy,  # label_smoothed_cross_entropy_with_entropy
    LabelSmoothedCrossEntropyWithCtcAndEntropy,  # label_smoothed_cross_entropy_with_ctc_and_entropy
    CtcWithEntropy,  # ctc_with_entropy
)

# tasks                                               --task
from speech_mt.tasks.speech import SpeechManifestTask  # speech_manifest

# optimizers and learning-rate schedules                --optimizer, --lr-scheduler
from speech_mt.optim.lars import FairseqLARS  # lars
from speech_mt.optim.plateau import PlateauSchedule  # plateau

# the training log                          entropy/encoder=1.8 1.9 ...: a number a layer, an entry a kind
from speech_mt.diagnostics import training_log

training_log.install()

# optimizers do not decay what is marked: Theta and psi of --value-spectrum, the scales of --token-mixing
from speech_mt.optim import weight_decay

weight_decay.install()
