#!/usr/bin/env bash
# bash run.sh [options]       train; bash run.sh --help lists the options
# bash run.sh test            run the tests
# Environment: PYTHON, the interpreter (default python3); TORCH, what to install where PyTorch is
# missing (default torch==2.13.0).
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
venv=$here/.venv

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "run.sh: $python is not Python 3.10 or newer: name one in PYTHON" >&2
    exit 2
}

# Training on GPUs needs PyTorch 2.4. CPUs and the tests need 2.9, because they use gloo, which now
# and then hangs at the exit in older versions.
has_packages() {
    "$1" - "$2" 2>/dev/null <<'END'
import sys
from importlib.metadata import version

version("numpy")
found = [int(part) for part in version("torch").split(".")[:2]]
if found < [2, 9]:
    import torch

    sys.exit(found < [2, 4] or sys.argv[1] == "test" or not torch.cuda.is_available())
END
}

if ! has_packages "$python" "${1-}"; then
    if ! has_packages "$venv/bin/python" "${1-}"; then
        echo "run.sh: installing PyTorch into $venv, once" >&2
        "$python" -m venv "$venv"  # Debian and Ubuntu have venv in the package python3-venv.
        "$venv/bin/python" -m pip install "${TORCH:-torch==2.13.0}" numpy >&2
    fi
    python=$venv/bin/python
fi

# Otherwise glibc gives the memory of large tensors back after each step: a quarter slower on a CPU.
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824

[ "${1-}" != test ] || { shift; exec "$python" "$here/test_ddp_reference.py" "$@"; }
exec "$python" "$here/ddp_reference.py" "$@"
