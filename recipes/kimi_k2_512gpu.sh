#!/usr/bin/env bash
# 64 machines of 8 GPUs: the first 32 train, 32 run engines. On each: NODE_RANK=<n> MASTER_ADDR=<machine 0> bash recipes/kimi_k2_512gpu.sh
CONFIG=configs/kimi_k2_512gpu.toml
TRAINER_NODES=32
source "$(dirname -- "${BASH_SOURCE[0]}")/cluster.sh"
