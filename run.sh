#!/usr/bin/env bash
# bash run.sh [options]     the main job; bash run.sh --help lists the options
# bash run.sh cases         which samples each rank reads
# bash run.sh test          the tests
# bash run.sh test FILE     the guarantees for a program of yours, with its options
# Environment: PYTHON (default python3); TORCH (what to install where torch is missing, default
# torch==2.13.0).
set -euo pipefail

here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
venv=$here/.venv

fail() {
    echo "run.sh: $1" >&2
    exit 2
}

# PyTorch 2.9 or newer, and numpy. Looked up, not imported: that alone would take seconds.
has_packages() {
    "$1" - 2>/dev/null <<'END'
import sys
from importlib.metadata import version

version("numpy")
sys.exit([int(part) for part in version("torch").split(".")[:2]] < [2, 9])
END
}

command -v -- "$python" >/dev/null ||
    fail "no $python: install Python 3.10 or newer, or name one in PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "$python is $("$python" --version 2>&1): install Python 3.10 or newer, or name one in PYTHON"

# The interpreter at hand, if it has the packages (a GPU box has its own build of PyTorch); otherwise
# .venv, made once. The file "complete" is written last: without it an installation was interrupted.
if ! has_packages "$python"; then
    if ! { [ -e "$venv/complete" ] && has_packages "$venv/bin/python"; }; then
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

# Otherwise glibc gives the memory of large tensors back after each step: a quarter slower on a CPU.
export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-33554432}
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1073741824}

if [ "${1-}" = test ]; then
    shift
    exec "$python" "$here/test_ddp_reference.py" "$@"
fi
exec "$python" "$here/ddp_reference.py" "$@"
