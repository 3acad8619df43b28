"""What the studies in examples/ share: running commands, tables of runs, where a number came from."""
