#!/usr/bin/env bash
# From a fresh clone to a trained model on two CPU cores: sets the environment up, makes the tiny model, runs RL on it.
# Further settings pass through: bash recipes/quickstart.sh --train.steps 100
# A tiny model of another family than DeepSeek-V3 comes first: bash recipes/quickstart.sh qwen3
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)
cd "$root"
python=$(bash tools/setup.sh)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} OMP_NUM_THREADS=1

family=deepseek
if [[ ${1:-} =~ ^[a-z] ]]; then
  family=$1
  shift
  set -- --model.path "runs/models/tiny-$family" --run.dir "runs/quickstart-$family" "$@"
fi
"$python" tools/make_tiny.py "$family" @ configs/tiny_cpu.toml "$@"
exec "$python" -m moerl.cli train @ configs/tiny_cpu.toml --overwrite "$@"
