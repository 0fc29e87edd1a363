#!/usr/bin/env bash
# Lint, import arrows and tests, in the project's environment (set up if missing).
#
#   bash tools/test.sh                       everything
#   bash tools/test.sh -k trace              arguments go to pytest
#   bash tools/test.sh tests/unit/config -x  with a path among them, only that is tested
#
# Every stage runs even if an earlier one failed; the exit code is that of the first that did.
set -uo pipefail

root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)
python=$(bash "$root/tools/setup.sh") || exit
cd "$root" || exit
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PATH=$(dirname "$python"):$PATH
workers=$(( $(nproc) < 8 ? $(nproc) : 8 ))
export OMP_NUM_THREADS=1  # after nproc, which obeys it

scratch=$(mktemp -d)
trap 'rm -rf -- "$scratch"' EXIT
trap 'exit 130' INT TERM
status=0
failed=()

stage() {
    local name=$1 code
    shift
    printf '\n== %s\n' "$name"
    "$@"
    code=$?
    # pytest answers 5 when nothing was selected; the summary at the end fails if that was so everywhere.
    if (( code != 0 && !(code == 5 && $# > 2) )); then
        failed+=("$name")
        if (( status == 0 )); then status=$code; fi
    fi
}

tests() {
    local name=$1
    shift
    stage "$name" "$python" -m pytest --junit-xml="$scratch/${name// /-}.xml" "$@"
}

has_path=
for argument in "$@"; do
    if [[ -e ${argument%%::*} ]]; then has_path=1; fi
done

if [[ -z $has_path ]]; then
    stage "ruff check" ruff check .
    stage "ruff format" ruff format --check .
    stage "import arrows" lint-imports --no-cache
    tests "unit tests" tests/unit -n "$workers" "$@"
    # Each of these starts processes of its own, of which two sets keep a small machine busy; what shares engines stays together.
    tests "parallel and system tests" tests/parallel tests/system -n 2 --dist loadfile "$@"
    tests "GPU tests" tests/gpu "$@"
else
    tests "tests" "$@"
fi

"$python" tools/junit_summary.py "$scratch" || (( status )) || status=5
if (( ${#failed[@]} )); then printf 'failed: %s\n' "$(IFS=,; echo "${failed[*]}")"; fi
exit "$status"
