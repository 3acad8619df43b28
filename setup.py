"""Packaging. Why each pin is what it is:

fairseq   PyPI's own `fairseq` (0.12.2) cannot be imported on Python >= 3.11 (mutable dataclass defaults) and
          needs pip < 24.1. `ve-fairseq` 0.12.3 is a third party's build of upstream main with that one fault
          mended, with wheels for CPython 3.11 and 3.12; its SHA-256 sums are in requirements/fairseq.txt, which
          `make install` checks before anything of it runs. No build exists for other Pythons, hence python_requires.
torch     torchaudio 2.11 is built on torch's stable ABI: one torchaudio serves torch 2.11 and newer.
          The ranges below were resolved by plain pip and tested at their upper end (torch 2.14.1, torchaudio 2.11.1).
jiwer     4.0 defines word error rates against empty references; older releases raise on them.
"""

from setuptools import find_packages, setup

setup(
    name="speech_mt",
    version="0.1.0",
    description="Deep speech and translation Transformers that do not collapse: a fairseq plugin.",
    license="MIT",
    packages=find_packages(include=["speech_mt", "speech_mt.*"]),
    python_requires=">=3.11,<3.13",
    install_requires=[
        "ve-fairseq==0.12.3",
        "torch>=2.11,<2.15",
        "torchaudio>=2.11,<2.12",
        "hydra-core>=1.3.2,<1.4",
        "omegaconf>=2.3,<2.4",
        "numpy>=1.26,<3",
        "sentencepiece>=0.2,<0.3",
        "sacrebleu>=2.4,<3",
        "jiwer>=4,<5",
        "rapidfuzz>=3,<4",
        "tensorboard>=2.16,<3",
        "soundfile>=0.12,<1",
        "matplotlib>=3.8,<4",
        "tqdm>=4.60,<5",
    ],
    extras_require={
        # the built-in numbers corpus: number words and a small speech synthesiser, both offline
        "demo": ["num2words>=0.5.13,<0.6", "py-nanotts>=0.1.1,<0.2"],
        # n-grams in CTC decoding; compiled when installed, with a C++ compiler and cmake; LGPL
        "ngram": ["kenlm>=0.3,<0.4"],
        # handwritten digits and Spearman's correlation, for examples/oversmoothing
        "oversmoothing": ["scikit-learn>=1.5,<2"],
        "deploy": ["ctranslate2>=4.5,<5"],  # scripts/export_ctranslate2.py
        "moses": ["sacremoses>=0.1.1,<0.3"],  # examples/wmt_en_de/prepare.py --moses
        # with the extras that the tests try, as far as they need no compiler
        "dev": ["scikit-learn>=1.5,<2", "ctranslate2>=4.5,<5", "sacremoses>=0.1.1,<0.3"]
        + ["pytest>=8,<10", "hypothesis>=6,<7", "ruff>=0.9,<1"],
    },
)
