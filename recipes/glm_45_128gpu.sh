#!/usr/bin/env bash
# 16 machines of 8 GPUs: the first 8 train, 8 run engines. On each: NODE_RANK=<n> MASTER_ADDR=<machine 0> bash recipes/glm_45_128gpu.sh
CONFIG=configs/glm_45_128gpu.toml
TRAINER_NODES=8
source "$(dirname -- "${BASH_SOURCE[0]}")/cluster.sh"
