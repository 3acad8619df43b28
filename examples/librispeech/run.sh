#!/usr/bin/env bash
# LibriSpeech, from its archives to word error rates: see README.md. What is done is not done again.
#
#   bash examples/librispeech/run.sh --root /data/LibriSpeech --download yes --config NAME      a config of config/
#   bash examples/librispeech/run.sh --root /data/LibriSpeech --arch ARCH --updates 20000       options of your own
#   bash examples/librispeech/run.sh ... --stage average --stop-stage score                     some stages
#   bash examples/librispeech/run.sh ... -- --lr 5e-4 --batch-size 8                            for the training command
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

stages=(prepare validate train average decode score)
root=${SPEECH_MT_DATA:-runs}/LibriSpeech
subsets="train-clean-100 dev-clean dev-other test-clean test-other"
download='' data=runs/librispeech/data prepare='' max_bad=0
config='' arch=spectral_ctc_transformer_tiny out='' updates=20000 subsampling=4
average=best decode='' stage=prepare stop_stage=score
usage="usage: run.sh [--stage S] [--stop-stage S] with S one of ${stages[*]}
  --root DIR          the folder LibriSpeech (now $root)
  --subsets \"A B\"     train-* to learn, dev-* to validate, test-* to test (now $subsets)
  --download yes      fetch subsets that are not there
  --data DIR          where the manifests go (now $data); --prepare \"--features\": further options of prepare.py
  --max-bad N         utterances with a fault to put up with (now $max_bad)
  --config NAME       config/NAME.yaml for fairseq-hydra-train, with its own numbers; or else
  --arch ARCH         for fairseq-train (now $arch), with --updates N (now $updates)
  --subsampling N     of the model, for CTC (now $subsampling; that of the config, if it says so)
  --out DIR           where the model and the results go (now runs/librispeech/NAME or ARCH)
  --average N|best    the last N checkpoints, or those of the best WER that are kept (now $average)
  --decode \"OPTIONS\"  further options of fairseq-generate
  -- OPTIONS          further options of the training command"
refuse() { echo "error: $1" >&2; echo "$usage" >&2; exit 2; }

while (($#)); do
    case $1 in
        --stage | --stop-stage | --root | --subsets | --download | --data | --prepare | --max-bad | --config | \
            --arch | --updates | --subsampling | --out | --average | --decode)
            (($# > 1)) || refuse "$1 needs a value"
            name=${1#--}; printf -v "${name//-/_}" %s "$2"; shift 2 ;;
        --) shift; break ;;
        *) refuse "$1 is no option" ;;
    esac
done
for name in "$stage" "$stop_stage"; do
    [[ " ${stages[*]} " == *" $name "* ]] || refuse "there is no stage $name"
done
[[ " ${stages[*]} " != *" $stop_stage "*"$stage "* ]] ||
    refuse "--stop-stage $stop_stage comes before --stage $stage"
for name in "$max_bad" "$updates" "$subsampling" "${average/#best/1}"; do
    [[ $name =~ ^[0-9]+$ ]] || refuse "$name is not a whole number"
done

folder=examples/librispeech/config
[[ -z $config || -f $folder/$config.yaml ]] || refuse "there is no $folder/$config.yaml"
out=${out:-runs/librispeech/${config:-$arch}}
limits=()
if [[ $config ]]; then # the config's own limits, also for the validation
    subsampling=$(sed -n 's/^ *ctc_subsampling: *\([0-9]*\).*/\1/p' "$folder/$config.yaml")
    frames=$(sed -n 's/^ *max_source_positions: *\([0-9]*\).*/\1/p' "$folder/$config.yaml" | head -n 1)
    [[ -z $frames ]] || limits=(--max-source-positions "$frames")
fi
limits+=(--ctc-subsampling "${subsampling:-0}")
[[ -d .venv/bin ]] && PATH=$PWD/.venv/bin:$PATH
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
those() { local subset; for subset in $subsets; do [[ $subset != $1* ]] || echo "$subset"; done; }
vocabulary() { [[ -f $data/spm.model ]] && echo sentencepiece || echo char; }
made() { [[ -f $1 && $1 -nt $2 && $(< "$1") == "$3" ]]; } # the marker $1 is of after the file $2, with options $3

[[ $(those dev)$(those test) || $stop_stage != @(decode|score) ]] ||
    refuse "--subsets names no dev-* and no test-* to decode"

prepare_stage() {
    local -a options
    read -ra options <<< "$subsets"
    # shellcheck disable=SC2086 # options of prepare.py
    python examples/librispeech/prepare.py --root "$root" --subsets "${options[@]}" --out "$data" \
        ${download:+--download} $prepare
}

validate_stage() {
    python examples/librispeech/validate.py "$data" --max-bad "$max_bad" --vocab-type "$(vocabulary)" "${limits[@]}"
}

train_stage() { # goes on from the last checkpoint
    local valid absolute interval=$((updates / 10 + 1))
    local -a command
    valid=$(those dev | paste -sd ,)
    [[ $valid ]] || refuse "--subsets names no dev-* to validate on"
    mkdir -p "$out"
    absolute=$(cd "$out" && pwd)
    if [[ $config ]]; then
        command=(fairseq-hydra-train --config-dir "$folder" --config-name "$config" "hydra.run.dir=$absolute/hydra"
            "common.user_dir=$PWD/user_dir" "task.data=$(cd "$data" && pwd)" "dataset.valid_subset='$valid'"
            "checkpoint.save_dir=$absolute/checkpoints" "common.tensorboard_logdir=$absolute/tensorboard" "$@")
    else
        command=(fairseq-train "$data" --user-dir user_dir --task speech_manifest --vocab-type "$(vocabulary)"
            --valid-subset "$valid" --arch "$arch" --reparam sigma --ctc-subsampling "$subsampling" --specaugment ld
            --criterion ctc_with_entropy --zero-infinity --monitor entropy,logits,gamma --monitor-interval 100
            --optimizer adam --adam-betas "(0.9, 0.98)" --lr 1e-3 --lr-scheduler inverse_sqrt
            --warmup-updates "$interval" --clip-norm 1.0 --max-tokens 24000 --max-update "$updates"
            --skip-invalid-size-inputs-valid-test --best-checkpoint-metric wer --no-epoch-checkpoints
            --save-interval-updates "$interval" --keep-interval-updates 5 --keep-best-checkpoints 5
            --save-dir "$out/checkpoints"
            --log-format simple --log-interval 10 --tensorboard-logdir "$out/tensorboard" "$@")
    fi
    if [[ -f $out/.train.completed && $(< "$out/.train.completed") == "${command[*]}" ]]; then
        echo "train: done already, see $out/train.log"
        return
    fi
    "${command[@]}" 2>&1 | tee -a "$out/train.log"
    echo "${command[*]}" > "$out/.train.completed"
}

average_stage() {
    local -a inputs=("$out/checkpoints" --num-update-checkpoints "$average")
    [[ $average != best ]] || inputs=("$out"/checkpoints/checkpoint.best_wer_*.pt)
    made "$out/.average.completed" "$out/checkpoints/checkpoint_last.pt" "$average" && return
    python scripts/average_checkpoints.py --inputs "${inputs[@]}" --output "$out/average.pt"
    echo "$average" > "$out/.average.completed"
}

decode_stage() {
    local split
    for split in $(those dev) $(those test); do
        made "$out/$split/.completed" "$out/average.pt" "$decode" && { echo "decode $split: done already"; continue; }
        # shellcheck disable=SC2086 # options of fairseq-generate
        fairseq-generate "$data" --user-dir user_dir --task speech_manifest --vocab-type "$(vocabulary)" \
            --path "$out/average.pt" --gen-subset "$split" --max-tokens 48000 --results-path "$out/$split" $decode \
            > "$out/$split.log" 2>&1 ||
            { echo "error: decoding $split failed, see $out/$split.log: $(tail -n 1 "$out/$split.log")" >&2; return 1; }
        echo "$decode" > "$out/$split/.completed"
    done
}

score_stage() {
    local split
    local -a sets=()
    for split in $(those dev) $(those test); do sets+=(--set "$split=$out/$split/generate-$split.txt"); done
    python scripts/score_wer.py "${sets[@]}" | tee "$out/wer.txt"
}

running=''
for name in "${stages[@]}"; do
    [[ $name != "$stage" ]] || running=yes
    [[ -z $running ]] || { echo "== $name"; "${name}_stage" "$@"; }
    [[ $name != "$stop_stage" ]] || exit 0
done
