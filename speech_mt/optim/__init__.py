"""What fairseq's optimizers are told."""
