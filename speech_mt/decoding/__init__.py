"""From a model's output to hypotheses."""
