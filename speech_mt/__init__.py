"""Deep speech and translation Transformers that do not collapse: a fairseq plugin."""

__version__ = "0.1.0"
