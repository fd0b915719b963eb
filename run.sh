#!/usr/bin/env bash
# bash run.sh [options]   train; bash run.sh --help lists the options
# bash run.sh test        run the tests
# bash run.sh programs    write the programs that the README shows
# PYTHON names an interpreter (default python3), TORCH a PyTorch to install (torch==2.13.0).
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
works() { "$1" -c 'import numpy, torch; assert torch.__version__ >= (2, 4)' 2>/dev/null; }
if [ -n "${TORCH-}" ] || ! works "$python"; then
    "$python" -c 'import sys; assert sys.version_info >= (3, 10), "PYTHON must be 3.10 or newer"'
    python=$here/.venv/bin/python
    if [ -n "${TORCH-}" ] || ! works "$python"; then
        echo "run.sh: installing PyTorch into $here/.venv, once" >&2
        "${PYTHON:-python3}" -m venv "$here/.venv"  # Debian and Ubuntu: package python3-venv
        "$python" -m pip install "${TORCH:-torch==2.13.0}" numpy >&2
    fi
fi
# Otherwise glibc gives the memory of large tensors back after each step: a quarter slower on a CPU.
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824
script=ddp_reference.py
case ${1-} in test) script=test_ddp_reference.py; shift ;; programs) script=test_ddp_reference.py ;; esac
exec "$python" "$here/$script" "$@"
