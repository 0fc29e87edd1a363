#!/usr/bin/env bash
# One machine of 8 GPUs; the settings say how they are shared. Further settings pass through: bash recipes/moonlight_16b_8gpu.sh --train.steps 10
set -euo pipefail
root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)
cd "$root"
python=$(bash tools/setup.sh)
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
exec "$python" -m moerl.cli train @ configs/moonlight_16b_8gpu.toml "$@"
