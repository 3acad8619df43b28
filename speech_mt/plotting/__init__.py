"""Runs as pictures: what fairseq and the monitor logged to TensorBoard, as one figure or one offline page.

runs     a run's scalars and its quantities per layer, read from event files
figures  loss, gradient norm and every quantity per layer, several runs side by side; heat maps
report   a single HTML file that opens offline
"""
