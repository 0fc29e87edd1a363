#!/usr/bin/env bash
#SBATCH --job-name=moerl
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
# sbatch --nodes=<trainer and engine machines> recipes/slurm.sh recipes/<name>.sh [SETTINGS]; submit it from the root of the repository.
# When the trainer ends, engines' machines are let go with the job.
set -euo pipefail
export MASTER_ADDR
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash -c 'NODE_RANK=$SLURM_NODEID bash "$@" && { ((SLURM_NODEID)) || scancel "$SLURM_JOB_ID"; }' recipe "$@"
