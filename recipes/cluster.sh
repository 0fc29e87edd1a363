#!/usr/bin/env bash
# What the recipes for several machines share; each sets CONFIG and TRAINER_NODES and sources this. Start it on every machine with
# NODE_RANK (0 .. machines - 1) and MASTER_ADDR (machine 0). The first TRAINER_NODES machines train; each of the others offers its GPUs
# to engines through Ray until the run has ended.
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)
cd "$root"
python=$(bash tools/setup.sh)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1
if [[ " $* " == *" --dry-run "* ]]; then exec "$python" -m moerl.cli train @ "$CONFIG" "$@"; fi
: "${NODE_RANK:?number of this machine, from 0}" "${MASTER_ADDR:?address of machine 0}"
ray=$(dirname "$python")/ray

if ((NODE_RANK >= TRAINER_NODES)); then
    until "$ray" start --address="$MASTER_ADDR:6379" --num-gpus=8; do sleep 5; done
    while "$ray" status --address="$MASTER_ADDR:6379" > /dev/null 2>&1; do sleep 10; done
    exec "$ray" stop
fi
if ((NODE_RANK == 0)); then
    "$ray" start --head --port=6379 --num-gpus=0
    trap '"$ray" stop' EXIT
fi
export RAY_ADDRESS=$MASTER_ADDR:6379
"$python" -m torch.distributed.run --nnodes="$TRAINER_NODES" --node-rank="$NODE_RANK" --nproc-per-node=8 \
    --master-addr="$MASTER_ADDR" --master-port=29500 -m moerl.train @ "$CONFIG" "$@"
