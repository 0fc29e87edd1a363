#!/usr/bin/env bash
# Makes the project's Python environment, once, and prints the path of its interpreter (the only line on stdout).
#
# The environment lies outside the clone, in ${XDG_CACHE_HOME:-~/.cache}/moerl/env-<key>; the key is a hash of the locked
# requirements, the kind of machine (cpu or gpu) and the Python version, so that clones with equal requirements share one. moerl
# itself is not installed there: it is found through PYTHONPATH, and its entry points through moerl.egg-info in the clone.
# A half-made environment (no `.complete` inside) is made anew; of two set-ups at once, one waits for the other.
set -euo pipefail

recipe=2                # raise it when the steps below change what an existing environment holds
lock_wait_s=3600        # how long to wait for another set-up
needed_gib=9            # environment and downloads

root=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)
lock=$root/requirements/lock.txt

say() { printf 'setup %4ds  %s\n' "$SECONDS" "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }

# A usable base interpreter: at least 3.12, with venv and pip. A pyenv shim of the right name can still refuse to run.
usable() { "$1" -c 'import sys, venv, ensurepip; raise SystemExit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

find_python() {
    local candidate pyenv_root=${PYENV_ROOT:-$HOME/.pyenv}
    for candidate in "$pyenv_root"/versions/3.12.*/bin/python3.12 "$(command -v python3.12)" \
        "$pyenv_root"/versions/3.1[3-9]*/bin/python "$(command -v python3.13)" "$(command -v python3)"; do
        if [[ -x $candidate ]] && usable "$candidate"; then echo "$candidate"; return; fi
    done
    if command -v uv >/dev/null; then
        candidate=$(uv python find 3.12 2>/dev/null || { uv python install 3.12 >&2 && uv python find 3.12; }) || candidate=
        if [[ -x $candidate ]] && usable "$candidate"; then echo "$candidate"; return; fi
    fi
    fail "no Python >= 3.12 with venv and pip was found (looked for python3.12 and newer on PATH, in pyenv and through uv);" \
        "install one, for example: apt-get install python3.12 python3.12-venv, or pyenv install 3.12, or uv python install 3.12"
}

# Device nodes, since asking nvidia-smi can take a second.
kind_of_machine() { if [[ -n $(ls -d /dev/nvidia[0-9]* 2>/dev/null) ]]; then echo gpu; else echo cpu; fi; }

installed() { find "$env"/lib/*/site-packages -maxdepth 1 -name '*.dist-info' 2>/dev/null | wc -l; }

# Runs a command with its output in the set-up's log, and says every 10 s how far it is.
logged() {
    local what=$1 pid status=0 beat=$SECONDS
    shift
    say "$what"
    "$@" >>"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null || true; exit 130' INT TERM
    while kill -0 "$pid" 2>/dev/null; do
        sleep 0.2
        if (( SECONDS >= beat + 10 )); then
            beat=$SECONDS
            say "  $(grep -cE '^(Collecting|Processing) ' "$log" || true) packages looked up, $(installed) in place"
        fi
    done
    wait "$pid" || status=$?
    trap - INT TERM
    return "$status"
}

publish_entry_points() {
    [[ $root/moerl.egg-info/entry_points.txt -nt $root/setup.py ]] && return
    [[ -w $root ]] || fail "$root is not writable, and SGLang finds moerl's plugin through moerl.egg-info in it; use a writable clone"
    (cd "$root" && "$1" setup.py -q egg_info) >&2 || fail "setup.py egg_info failed in $root"
    touch "$root/moerl.egg-info/entry_points.txt"
}

# Whether setup.py builds for CUDA; a flag leaves it out.
has_cuda() {
    [[ -z ${MOERL_SKIP_CUDA:-} ]] && command -v nvcc >/dev/null \
        && grep -qsE "^cuda\b.*= *['\"]" "$env"/lib/python*/site-packages/torch/version.py
}

# Compiles one source of csrc/ into a room, unless that is done. Without it moerl does the same work otherwise.
build_one() {
    local python=$1 source=$2 room=$3 name=$4 otherwise=$5 built newer scratch
    [[ -e $root/$source && -w $root/$room ]] || return 0
    for built in "$root/$room/$name".*.so; do
        newer=$(find "$root/$source" "$root"/csrc/*.h "$root/setup.py" -newer "$built" 2>/dev/null || true)
        if [[ -e $built && -z $newer ]]; then return; fi
    done
    say "compiling $source"
    scratch=$(mktemp -d "$root/$room/.build.XXXXXX")
    if (cd "$root" && "$python" setup.py -q build_ext --build-temp "$scratch" --build-lib "$scratch" --only "${room//\//.}.$name") >&2 \
        && compgen -G "$scratch/$room/$name.*.so" >/dev/null; then
        rm -f -- "$root/$room/$name".*.so
        mv -- "$scratch/$room/$name".*.so "$root/$room/"
    else
        say "warning: $source did not compile; $otherwise, more slowly and with the same result"
    fi
    rm -rf -- "$scratch"
}

build_native() {
    { command -v c++ || command -v g++ || command -v clang++; } >/dev/null || return 0
    build_one "$1" csrc/routes.cpp moerl/routing _routes "routes are coded with numpy instead"
    build_one "$1" csrc/pack.cpp moerl/reshard/pack _pack "torch packs weights on CPUs instead"
    if has_cuda; then build_one "$1" csrc/pack.cu moerl/reshard/pack _pack_cuda "Triton packs weights on GPUs instead"; fi
}

make_env() {
    local base=$1 kind=$2 free_gib pip
    mkdir -p "$(dirname "$env")"
    free_gib=$(( $(df -Pk "$(dirname "$env")" | awk 'NR==2 {print $4}') / 1048576 ))
    (( free_gib >= needed_gib )) || fail "$(dirname "$env") has $free_gib GiB free, and the environment needs $needed_gib;" \
        "free some space or set XDG_CACHE_HOME to a larger disk"
    say "making the $kind environment in $env with $("$base" -V); log: $log"
    rm -rf -- "$env"
    : >"$log"
    logged "creating a virtual environment" "$base" -m venv "$env" || fail "venv failed; see $log"
    pip=("$env/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off --no-compile)
    logged "installing $(grep -c '==' "$lock") locked packages (several GB; minutes)" "${pip[@]}" --no-deps -r "$lock" \
        || { tail -n 15 "$log" >&2; fail "pip failed; the whole log is $log. Run the set-up again to retry"; }
    if [[ $kind == gpu ]]; then install_gpu; fi
    # Here, on all cores, and not at the first import: where PYTHONDONTWRITEBYTECODE is set, every process would compile again.
    logged "compiling to bytecode" "$env/bin/python" -W ignore -m compileall -q -j 0 "$env/lib" || true  # some packages ship templates
    touch "$env/.complete"
    say "done"
}

install_gpu() {
    publish_entry_points "$env/bin/python"
    local wanted=$env/gpu.txt held=$env/constraints.txt
    grep -vE '^(cuda|nvidia)-' "$lock" >"$held"  # SGLang and torch agree on the CUDA libraries between themselves
    awk '/^\[/ {on = ($0 == "[gpu]"); next} on && NF' "$root/moerl.egg-info/requires.txt" >"$wanted"
    logged "installing SGLang with its CUDA kernels" "${pip[@]}" -c "$held" "$(grep '^sglang' "$wanted")" \
        || { tail -n 15 "$log" >&2; fail "pip failed; the whole log is $log. Run the set-up again to retry"; }
    # Transformer Engine compiles against CUDA; without it moerl still runs, on Megatron's local layers, and `moerl doctor` says so.
    logged "building Transformer Engine (10 minutes or more)" "${pip[@]}" -c "$held" --no-build-isolation "$(grep '^transformer' "$wanted")" \
        || say "warning: Transformer Engine did not install (see $log); moerl doctor tells what that costs and how to retry"
}

kind=$(kind_of_machine)
base=$(find_python)
version=$("$base" -c 'import sys, platform; print(*sys.version_info[:2], platform.machine())')
# The set of a GPU machine also depends on the extra that setup.py names.
key=$({ echo "$recipe $kind $version"; cat "$lock"; if [[ $kind == gpu ]]; then cat "$root/setup.py"; fi; } | sha256sum | cut -c 1-12)
env=${XDG_CACHE_HOME:-$HOME/.cache}/moerl/env-$key
log=$env.log

if [[ ! -e $env/.complete ]]; then
    mkdir -p "$(dirname "$env")"
    exec 9>"$env.lock"
    if ! flock -n 9; then
        say "another set-up is making $env; waiting for it (at most $lock_wait_s s)"
        flock -w "$lock_wait_s" 9 || fail "another set-up held $env.lock for $lock_wait_s s; if none is running, remove that file"
    fi
    if [[ ! -e $env/.complete ]]; then make_env "$base" "$kind"; fi
    exec 9>&-
fi
publish_entry_points "$env/bin/python"
build_native "$env/bin/python"
echo "$env/bin/python"
