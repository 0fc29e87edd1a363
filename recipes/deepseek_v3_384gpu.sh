#!/usr/bin/env bash
# 48 machines of 8 GPUs: the first 32 train, 16 run engines. On each: NODE_RANK=<n> MASTER_ADDR=<machine 0> bash recipes/deepseek_v3_384gpu.sh
CONFIG=configs/deepseek_v3_384gpu.toml
TRAINER_NODES=32
source "$(dirname -- "${BASH_SOURCE[0]}")/cluster.sh"
