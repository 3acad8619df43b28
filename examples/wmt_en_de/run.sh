#!/usr/bin/env bash
# Train and test one model on WMT'17 English-German; data by prepare.py. See README.md.
#
#   bash examples/wmt_en_de/run.sh 18 deepnorm                    train, average, decode, score on 8 GPUs
#   bash examples/wmt_en_de/run.sh 100 deepnorm --print           print the fairseq-train line
#   bash examples/wmt_en_de/run.sh 50 sigma_reparam --gpus 2 -- --seed 2 --fp16-scale-window 256
#
# DEPTH 6 18 50 100; METHOD post_ln pre_ln deepnorm sigma_reparam sigma_reparam_spectral deepnorm_sigma_reparam
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/methods.sh

usage="usage: run.sh DEPTH METHOD [--gpus N] [--batch regular|huge] [--precision bf16|fp16|float32] [--updates N]
       [--tokens TOKENS_A_GPU] [--data DIR] [--out DIR] [--print] [-- further options of fairseq-train]"
(($# >= 2)) || { echo "$usage" >&2; exit 2; }
depth=$1 method=$2; shift 2
gpus=8 precision=bf16 updates=100000 tokens=4096 data=runs/wmt_en_de/data out='' print=''
case $depth in
    6 | 18) batch=regular recompute='' ;;
    50 | 100) batch=huge recompute=--checkpoint-activations ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
while (($#)); do
    case $1 in
        --print) print=yes; shift ;;
        --) shift; break ;;
        --gpus | --batch | --precision | --updates | --tokens | --data | --out) printf -v "${1#--}" %s "${2:?$1 needs a value}"; shift 2 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
for name in gpus tokens updates; do
    [[ ${!name} =~ ^[1-9][0-9]*$ ]] || {
        echo "error: --$name ${!name} is not a whole number of at least 1" >&2; exit 2; }
done
out=${out:-runs/wmt_en_de/${depth}l-$method}

# admin-torch's two recipes for this data. At 100L-100L DeepNorm was reported to train with the huge batch only, and Admin
# of the paper with the regular one only: a depth needs its batch and its learning rate together.
case $batch in
    regular) total=32768 lr=1e-3 warmup=8000 regularisation="--dropout 0.1 --attention-dropout 0.1 --activation-dropout 0.1" ;;
    huge) total=524288 lr=1.5e-3 warmup=4000 regularisation="--dropout 0.4 --weight-decay 1e-4" ;;
    *) echo "$usage" >&2; exit 2 ;;
esac
case $precision in bf16 | fp16) precision=--$precision ;; float32) precision='' ;; *) echo "$usage" >&2; exit 2 ;; esac
((total % (tokens * gpus) == 0)) || {
    echo "error: $total tokens an update are no multiple of $tokens on each of $gpus GPUs: give other --tokens" >&2; exit 1; }
flags=$(method_flags "$method")

# shellcheck disable=SC2206 # the options hold no spaces
train=(fairseq-train "$data/bin" --user-dir user_dir --task translation -s en -t de
    --arch "spectral_transformer_${depth}l" $flags --share-all-embeddings $recompute $regularisation
    --criterion label_smoothed_cross_entropy_with_entropy --label-smoothing 0.1
    --monitor entropy,logits,gamma,smoothing --monitor-interval 100
    --optimizer adam --adam-betas "(0.9, 0.98)" --clip-norm 0.0 --lr "$lr" --lr-scheduler inverse_sqrt
    --warmup-init-lr 1e-07 --warmup-updates "$warmup" --max-update "$updates" $precision
    --max-tokens "$tokens" --update-freq $((total / tokens / gpus)) --distributed-world-size "$gpus" --seed 1
    --save-interval-updates 1000 --keep-interval-updates 10 --no-epoch-checkpoints --save-dir "$out/checkpoints"
    --log-format simple --log-interval 100 --tensorboard-logdir "$out/tensorboard" "$@")
if [[ $print ]]; then
    printf '%q ' "${train[@]}"; echo
    exit
fi

[[ -d .venv/bin ]] && PATH=$PWD/.venv/bin:$PATH
"${train[@]}"
python scripts/average_checkpoints.py --inputs "$out/checkpoints" --num-update-checkpoints 10 --output "$out/average.pt"
tokenizer=(); [[ -d $data/moses ]] && tokenizer=(--tokenizer moses --moses-source-lang en --moses-target-lang de)
for reference in "$data"/text/test*.de; do
    split=$(basename "$reference" .de)
    fairseq-generate "$data/bin" --user-dir user_dir --task translation -s en -t de --path "$out/average.pt" \
        --gen-subset "$split" --beam 4 --lenpen 0.6 --max-tokens 8000 --remove-bpe sentencepiece "${tokenizer[@]}" \
        --results-path "$out/$split" > "$out/$split.log"
    python scripts/score_bleu.py "$out/$split/generate-$split.txt" --ref "$reference" --compound-split --by-length |
        tee "$out/$split/bleu.txt"
done
