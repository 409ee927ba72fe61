#!/usr/bin/env bash
# Which attention survives four bits? Seven kinds of attention with three seeds each, from text to
# tables: trained side by side on all GPUs of the host, quantized, scored, analyzed. What is finished
# is kept: stopped at any point, the same command goes on there.
#
#   recipes/train/kinds-27m.sh TEXT DATA
#
# TEXT: what to train on, as `qbench tokenize` takes it, without evaluation texts: 40 M tokens or more.
# DATA: a folder of TASK/SPLIT.jsonl, with one JSON Lines file of text in DATA/calibration or beside
# DATA in calibration. Results go to results/kinds-27m, kinds-27m-gate and kinds-27m-answers.
# Settings: TOKENS of each training (80000000), SLOTS (6): trainings side by side on a GPU, SEEDS
# ("0 1 2"), WORKERS (12): cells side by side on a GPU.
set -euo pipefail

if [ $# -ne 2 ]; then
  echo "usage: $0 TEXT DATA" >&2
  exit 2
fi
data=$(realpath "$2") text=$1
if [ -e "$text" ]; then text=$(realpath "$text"); fi
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
gpus=$(nvidia-smi -L | wc -l)
export GPUS=$gpus TOKENS=${TOKENS:-80000000} OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=4
kinds="softmax softpick softmax+head-gate softmax-sink softmax+element-gate sigmoid softmax1"

if [ ! -e training/tokens/kinds-27m ]; then
  qbench tokenize "$text" --vocabulary 8192 --no-bos --decontaminate "$data" --out training/tokens/kinds-27m
fi

train() { # number, kind, seed: the log of each stands beside the checkpoints
  CUDA_VISIBLE_DEVICES=$(($1 % GPUS)) qbench train recipes/train/kinds-27m.yaml --tokens "$TOKENS" \
    --normalizer "$2" --seed "$3" > "training/kinds-27m-$2-seed$3.log" 2>&1
}
export -f train
number=0
for seed in ${SEEDS:-0 1 2}; do # seed by seed, so that all kinds of one are complete early
  for kind in $kinds; do echo "$number $kind $seed"; number=$((number + 1)); done
done | xargs -P $((gpus * ${SLOTS:-6})) -L 1 bash -c 'train "$@"' _

run() { qbench run "$@" --data "$data" --gpus all --workers "${WORKERS:-12}"; }
# first what the answer rests on, then every precision
run recipes/kinds-27m.yaml --quantizers bf16,gptq-4bit,w4a4-nvfp4,rtn-4bit,a4,kv3
run recipes/kinds-27m-gate.yaml
qbench analyze recipes/kinds-27m.yaml --data "$data" --only '*.1/bf16' --sensitivity w4a4-nvfp4 \
  --samples 16 --length 512
qbench analyze recipes/kinds-27m.yaml --data "$data" --samples 60 --length 512
run recipes/kinds-27m.yaml
run recipes/kinds-27m-answers.yaml
for results in kinds-27m kinds-27m-gate kinds-27m-answers; do # one file each to commit, with the trainings' records
  qbench export "results/$results" --to archive
done
for run in training/kinds-27m/*-seed*; do
  kept=results/kinds-27m/training/$(basename "$run")
  mkdir -p "$kept"
  cp "$run/training.json" "$run/state/log.jsonl" "$kept"
done
