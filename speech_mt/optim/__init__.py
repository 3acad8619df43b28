"""Optimizers and learning-rate schedules that fairseq lacks, and what its own are told."""
