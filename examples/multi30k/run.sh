#!/usr/bin/env bash
# Multi30k English to German, from raw text to BLEU: see README.md. What is done is not done again.
#
#   bash examples/multi30k/run.sh                                              3L-3L, width 256, on two cores
#   bash examples/multi30k/run.sh --layers 18 --width 64 --ffn 256 --lr 2e-3   deep and narrow
#   bash examples/multi30k/run.sh --stage train --methods sigma_reparam        one stage of one model
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source examples/methods.sh

out=runs/multi30k source=en target=de stage=all
methods="sigma_reparam_spectral post_ln" layers=3 width=256 ffn=512 heads=4
updates=2400 lr=1e-3 warmup=400 dropout=0.2 max_tokens=2400 seed=1 jobs=2
usage="options: --out --source --target --methods --layers --width --ffn --heads --updates --lr --warmup --dropout
--max-tokens --seed, --jobs (models trained at a time, one core each), --stage prepare|train|decode|report|all"

while (($#)); do
    option=${1#--} option=${option//-/_}
    case $option in
        out | source | target | stage | methods | layers | width | ffn | heads | updates | lr | warmup | dropout | \
            max_tokens | seed | jobs) printf -v "$option" %s "${2:?$1 needs a value}"; shift 2 ;;
        *) echo "$usage" >&2; exit 2 ;;
    esac
done
refuse() { echo "error: $1" >&2; exit 2; }
for option in layers width ffn heads updates max_tokens jobs; do
    [[ ${!option} =~ ^[1-9][0-9]*$ ]] || refuse "--${option//_/-} ${!option} is not a whole number of at least 1"
done
for option in warmup seed; do
    [[ ${!option} =~ ^[0-9]+$ ]] || refuse "--$option ${!option} is not a whole number"
done
[[ -d .venv/bin ]] && PATH=$PWD/.venv/bin:$PATH
export OMP_NUM_THREADS=1
data=$out/data-$source-$target

folder_of() { echo "$out/$source-$target-${layers}l-$width-lr$lr-$updates-seed$seed/$1"; }

option_line() {
    echo "--source $source --target $target --layers $layers --width $width --ffn $ffn --heads $heads" \
        "--updates $updates --lr $lr --warmup $warmup --dropout $dropout --max-tokens $max_tokens --seed $seed"
}

refuse_other_options() { # method: not all options are in the folder's name, and a training goes on in its folder
    local file; file=$(folder_of "$1")/options
    [[ ! -f $file || $(< "$file") == "$(option_line)" ]] ||
        refuse "${file%/options} is of other options ($(< "$file")): give those or another --out, or delete it"
}

prepare() {
    python examples/multi30k/prepare.py --out "$data" --source-lang "$source" --target-lang "$target"
}

train() { # method: goes on from the last checkpoint; linear decay to 0, since the budget is known beforehand
    local folder; folder=$(folder_of "$1")
    mkdir -p "$folder"
    option_line > "$folder/options"
    # shellcheck disable=SC2046
    fairseq-train "$data/bin" --user-dir user_dir --task translation -s "$source" -t "$target" \
        --arch spectral_transformer $(method_flags "$1") --share-all-embeddings \
        --encoder-layers "$layers" --decoder-layers "$layers" --encoder-embed-dim "$width" \
        --encoder-ffn-embed-dim "$ffn" --encoder-attention-heads "$heads" --dropout "$dropout" \
        --criterion label_smoothed_cross_entropy_with_entropy --label-smoothing 0.1 \
        --monitor entropy,logits,gamma,smoothing --monitor-interval 20 \
        --optimizer adam --adam-betas '(0.9, 0.98)' --clip-norm 1.0 --lr "$lr" \
        --lr-scheduler polynomial_decay --warmup-updates "$warmup" --total-num-update "$updates" \
        --max-update "$updates" --max-tokens "$max_tokens" --seed "$seed" \
        --save-interval-updates 100 --keep-interval-updates 5 --no-epoch-checkpoints \
        --log-format simple --log-interval 20 --tensorboard-logdir "$folder/tensorboard" \
        --save-dir "$folder/checkpoints" >> "$folder/train.log" 2>&1 ||
        { echo "error: training $1 failed: $(tail -n 1 "$folder/train.log") (all of it is in $folder/train.log)" >&2; return 1; }
    sed -n "s|.*valid on 'valid' subset . \(loss [0-9.]*\) .*\(num_updates [0-9]*\).*|$folder: \1, \2|p" \
        "$folder/train.log" | tail -n 1
}

generate() { # folder, split, length penalty: beam 5 on the average of the last checkpoints
    [[ $1/$2-$3/generate-$2.txt.completed -nt $1/average.pt ]] && return
    fairseq-generate "$data/bin" --user-dir user_dir --task translation -s "$source" -t "$target" --gen-subset "$2" \
        --path "$1/average.pt" --beam 5 --lenpen "$3" --max-len-a 1.5 --max-len-b 10 --batch-size 64 \
        --remove-bpe sentencepiece --results-path "$1/$2-$3" > "$1/generate.log" 2>&1 ||
        { echo "error: decoding failed: $(tail -n 1 "$1/generate.log") (all of it is in $1/generate.log)" >&2; return 1; }
    echo done > "$1/$2-$3/generate-$2.txt.completed"
}

decode() { # method: the length penalty is chosen on the validation set, then the test sets are decoded with it
    local folder split penalty; folder=$(folder_of "$1")
    local saved; saved=$(find "$folder/checkpoints" -name 'checkpoint_*_*.pt' | wc -l)
    [[ $folder/average.pt -nt $folder/checkpoints/checkpoint_last.pt ]] ||
        python scripts/average_checkpoints.py --inputs "$folder/checkpoints" \
            --num-update-checkpoints $((saved < 5 ? saved : 5)) --output "$folder/average.pt"
    for penalty in 0.6 1.0 1.4 1.8; do
        generate "$folder" valid "$penalty"
        score "$folder" valid "$penalty"
    done
    penalty=$(python examples/multi30k/results.py "$folder" --best-penalty)
    for split in test test1 test2; do
        generate "$folder" "$split" "$penalty"
        score "$folder" "$split" "$penalty"
    done
}

score() { # folder, split, length penalty: against the text as published
    [[ $1/$2-$3/bleu.json -nt $1/$2-$3/generate-$2.txt.completed ]] && return
    python scripts/score_bleu.py "$1/$2-$3/generate-$2.txt" --ref "$data/text/$2.$target" --json > "$1/$2-$3/bleu.tmp"
    mv "$1/$2-$3/bleu.tmp" "$1/$2-$3/bleu.json"
}

report() { # the table of every model that was trained, and the curves of those of these options
    python examples/multi30k/results.py "$out"/*/*/ > "$out/results.tmp"
    mv "$out/results.tmp" "$out/RESULTS.md"
    local folders=() method
    for method in $methods; do folders+=("$(folder_of "$method")/tensorboard"); done
    python scripts/plot_run.py "${folders[@]}" --labels "${methods// /,}" --out "$(folder_of curves).png" \
        --title "Multi30k $source-$target, ${layers}L-${layers}L, width $width, learning rate $lr"
    cat "$out/RESULTS.md"
}

each_method() { # at most $jobs at a time; fails if one does
    local method status=0
    for method in $methods; do
        while (($(jobs -rp | wc -l) >= jobs)); do sleep 1; done
        "$1" "$method" &
    done
    for method in $(jobs -p); do wait "$method" || status=1; done
    return $status
}

main() { # a function, so that all of the script is read before it runs for an hour
    local method
    for method in $methods; do method_flags "$method" > /dev/null; refuse_other_options "$method"; done
    case $stage in
        all) prepare; each_method train; each_method decode; report ;;
        prepare | report) "$stage" ;;
        train | decode) each_method "$stage" ;;
        *) echo "$usage" >&2; return 2 ;;
    esac
}
main; exit
