"""fairseq tasks; importing a module here imports fairseq and registers the task."""
