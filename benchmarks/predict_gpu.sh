#!/bin/sh
# Time `predict` on a GPU for every network of docs/benchmarks.md, at most a quarter of an hour.
#
#     sh benchmarks/predict_gpu.sh
#     OUT=/tmp sh benchmarks/predict_gpu.sh --device cpu --batch 1 --side 32 --seconds 20 --repeats 3
#
# Further arguments replace those below; the second line tries all commands on a CPU. The first failure ends it. Each
# file is written as soon as its network is measured, and ways that are not ready in time have rows that say so.
set -e
cd "$(dirname "$0")/.."
out=${OUT:-benchmarks/results}

measure() { # the name of the file, then arguments
    name=$1
    shift
    "${PYTHON:-python}" benchmarks/predict.py --compile --precision bf16 --out "$out/predict-gpu-$name.json" "$@"
}

measure resnet-18 --channels-last --seconds 120 --batch 256 --network resnet-18 "$@"
measure vit --seconds 300 --batch 64 --network vit-base "$@"
measure unet --channels-last --seconds 300 --batch 64 --network unet "$@"
measure resnet-50 --channels-last --seconds 150 --batch 64 --network resnet-50 "$@"
