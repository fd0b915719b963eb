#!/usr/bin/env bash
# bash run.sh [options]          train the example (bash run.sh --help lists the options)
# bash run.sh my_job.py [...]    run a script with the same Python
# bash run.sh test               run the tests (also: check, review, programs; see README.md)
# PYTHON names the interpreter (python3). TORCH names a PyTorch to install (torch==2.13.0).
set -euo pipefail
# These would change what cd prints, and how Python asserts and imports.
unset CDPATH PYTHONOPTIMIZE PYTHONSAFEPATH
here=$(dirname -- "$(realpath -- "${BASH_SOURCE[0]}")")
base=${PYTHON:-python3}
venv=$here/.venv

# Print what this interpreter lacks, or nothing.
lacks() {
    "$1" - <<'PYTHON' || echo "a Python that works"
import os
from importlib.metadata import PackageNotFoundError, version

hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
gpus = os.path.exists("/dev/nvidiactl") and not hidden
try:
    version("numpy")
    major, minor = version("torch").split(".")[:2]
except PackageNotFoundError:
    print("NumPy or PyTorch")
else:
    if (int(major), int(minor)) < ((2, 6) if gpus else (2, 9)):
        print("PyTorch 2.9 or newer (with GPUs 2.6)")
    elif gpus:
        import torch  # This takes seconds, so it is not done without GPUs.

        if not torch.cuda.is_available():
            print("a PyTorch for this GPU driver (perhaps an older one: TORCH=torch==2.9.1)")
PYTHON
}

python=$base
if [ -n "${TORCH-}" ] || [ -n "$(lacks "$base")" ]; then
    python=$venv/bin/python
    if [ -n "${TORCH-}" ] || [ ! -x "$python" ]; then
        echo "run.sh: installs ${TORCH:-PyTorch} into $venv, which may download gigabytes" >&2
        "$base" -m venv "$venv"  # Debian and Ubuntu have this in the package python3-venv.
        "$python" -m pip install "${TORCH:-torch==2.13.0}" numpy >&2
    fi
    missing=$(lacks "$python")
    if [ -n "$missing" ]; then
        echo "run.sh: $venv lacks $missing. Delete $venv, or set CUDA_VISIBLE_DEVICES= to use the CPU" >&2
        exit 1
    fi
fi

# Otherwise glibc gives back the memory of large tensors after each step, which slows a CPU down.
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824

case ${1-} in
    test)
        shift
        exec "$python" "$here/test_ddp_reference.py" "$@"
        ;;
    check | review | programs)
        exec "$python" "$here/test_ddp_reference.py" "$@"
        ;;
    *.py)
        exec "$python" "$@"
        ;;
    *)
        exec "$python" "$here/ddp_reference.py" "$@"
        ;;
esac
