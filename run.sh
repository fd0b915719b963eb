#!/usr/bin/env bash
# bash run.sh [train|cases|write-shards DIR] [options]   the main job and the other commands (see --help)
# bash run.sh test [options]                             the tests
# Environment: PYTHON (default python3), TORCH (what to install where torch is missing, default
# torch==2.13.0), and for several machines NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, NPROC_PER_NODE.
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
venv=$here/.venv

fail() { echo "run.sh: $1" >&2; exit 2; }
# Looked up, not imported: that alone would take seconds.
has_packages() { "$1" -c 'import sys; from importlib.util import find_spec as f; sys.exit(not (f("torch") and f("numpy")))'; }

command -v -- "$python" >/dev/null || fail "no $python: install Python 3.10 or newer, or name one in PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is $("$python" --version 2>&1): install Python 3.10 or newer, or name one in PYTHON"

# The interpreter at hand, if it has the packages (a GPU box has its own build of PyTorch); otherwise
# .venv, made once. The file "complete" is written last: without it an installation was interrupted.
if ! has_packages "$python"; then
    if ! { [ -e "$venv/complete" ] && has_packages "$venv/bin/python" 2>/dev/null; }; then
        "$python" -c 'import venv, ensurepip' 2>/dev/null ||
            fail "$python has no venv module: install it (on Debian and Ubuntu: apt install python3-venv)"
        mkdir -p -- "$venv" 2>/dev/null && [ -w "$venv" ] ||
            fail "cannot write $venv: copy this folder elsewhere, or name in PYTHON a Python that has torch and numpy"
        echo "run.sh: installing PyTorch into $venv, once" >&2
        "$python" -m venv "$venv" >&2
        "$venv/bin/python" -m pip install --ignore-installed "${TORCH:-torch==2.13.0}" \
            'numpy==2.2.6; python_version < "3.11"' 'numpy==2.4.6; python_version >= "3.11"' >&2 ||
            fail "the installation failed (see above): run again to go on, or install torch and numpy yourself"
        touch -- "$venv/complete"
    fi
    python=$venv/bin/python
fi

if [ "${1-}" = test ]; then
    shift
    exec "$python" "$here/test_ddp_reference.py" "$@"
elif [ "${NNODES:-1}" -gt 1 ]; then
    for name in NODE_RANK MASTER_ADDR; do
        [ -n "${!name-}" ] || fail "NNODES is $NNODES: set $name too (see README.md)"
    done
    # The second number is each process's share of the cores: torchrun alone would make it one.
    read -r processes threads < <("$python" -c 'import os, torch
n = int(os.environ.get("NPROC_PER_NODE") or torch.cuda.device_count() or 2)
print(n, max(1, torch.get_num_threads() // n))')
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$threads}
    exec "$python" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" \
        --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" --nproc-per-node "$processes" \
        "$here/ddp_reference.py" "$@"
else
    exec "$python" "$here/ddp_reference.py" "$@"
fi
