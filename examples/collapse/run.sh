#!/usr/bin/env bash
# A run that collapses, on purpose, and what is seen of it: half a minute on one core, after `make demo` made its corpus.
set -eu
cd "$(dirname "$0")/../.."
data=runs/numbers/data/mt/bin
out=runs/collapse
test -e "$data/dict.de.txt" || { echo "error: $data: not there; python examples/numbers/prepare.py makes it" >&2; exit 1; }

rm -rf "$out"
OMP_NUM_THREADS=1 fairseq-train "$data" --user-dir user_dir --cpu --task translation --arch spectral_transformer_tiny \
    --encoder-layers 3 --decoder-layers 3 --norm-placement none --share-all-embeddings --dropout 0 \
    --criterion label_smoothed_cross_entropy_with_entropy --label-smoothing 0.1 --monitor entropy,logits,smoothing --monitor-interval 5 \
    --optimizer adam --adam-betas '(0.9, 0.98)' --lr 0.014 --lr-scheduler fixed --max-tokens 1600 --max-update 200 --seed 1 \
    --num-workers 0 --log-format simple --log-interval 5 --disable-validation --no-save --save-dir "$out" --tensorboard-logdir "$out" "$@" ||
    echo "the training ended early, as it should"
python scripts/plot_run.py "$out" --labels "3L-3L without LayerNorm" --title "A run that collapses" --out "$out/run.png" --html "$out/report.html"
