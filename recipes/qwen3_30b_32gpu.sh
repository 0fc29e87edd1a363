#!/usr/bin/env bash
# 4 machines of 8 GPUs: the first 2 train, 2 run engines. On each: NODE_RANK=<n> MASTER_ADDR=<machine 0> bash recipes/qwen3_30b_32gpu.sh
CONFIG=configs/qwen3_30b_32gpu.toml
TRAINER_NODES=2
source "$(dirname -- "${BASH_SOURCE[0]}")/cluster.sh"
