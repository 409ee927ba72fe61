#!/usr/bin/env bash
# Three seeds of softmax and softpick, 27 M parameters each, from text to tables: weights at 2 to 8
# bits, the KV cache, activations, and what their hidden states look like. For a host with GPUs, all of
# which are used. It stops at the first command that fails; started again it continues there.
#
#   recipes/train/seeds-27m.sh TEXT DATA
#
# TEXT: what to train on, as `qbench tokenize` takes it: a file, or hf://datasets/OWNER/NAME.
# DATA: a folder of TASK/SPLIT.jsonl, with one JSON Lines file of text in DATA/calibration or beside
# DATA in calibration. Results go to results/seeds-27m, seeds-27m-kv and seeds-27m-activations.
set -euo pipefail

if [ $# -ne 2 ]; then
  echo "usage: $0 TEXT DATA" >&2
  exit 2
fi
text=$1 data=$2
texts_in() { compgen -G "$1/*.jsonl" > /dev/null; }
if ! texts_in "$data/calibration" && ! texts_in "$data/../calibration"; then
  echo "$data: no *.jsonl in $data/calibration or $data/../calibration" >&2
  exit 2
fi
data=$(realpath "$data")
if [ -e "$text" ]; then text=$(realpath "$text"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

tokens=training/tokens/27m
trained=training/pair-27m
checkpoints=(
  --checkpoint "softmax=$trained/softmax-seed*"
  --checkpoint "softpick=$trained/softpick-seed*"
)

if [ ! -e "$tokens" ]; then
  qbench tokenize "$text" --vocabulary 8192 --out "$tokens"
fi
qbench train recipes/train/pair-27m.yaml

qbench run recipes/appendix-340m.yaml "${checkpoints[@]}" --data "$data" \
  --out results/seeds-27m --gpus all --workers 9
qbench run recipes/kv.yaml "${checkpoints[@]}" --data "$data" \
  --out results/seeds-27m-kv --gpus all --workers 9
qbench run recipes/activations.yaml "${checkpoints[@]}" --data "$data" \
  --out results/seeds-27m-activations --gpus all --workers 9

qbench analyze recipes/appendix-340m.yaml "${checkpoints[@]}" --data "$data" \
  --samples 60 --length 512 --out results/seeds-27m

for results in results/seeds-27m results/seeds-27m-kv results/seeds-27m-activations; do
  qbench view "$results" --export "$results/site"
done
