"""Data: manifests, audio, features, transcripts and the datasets made of them. Only the datasets import
fairseq."""
