#!/usr/bin/env bash
# bash run.sh [options]   train; bash run.sh --help lists the options
# bash run.sh test        run the tests
# bash run.sh programs    write the programs that the README shows
# PYTHON names an interpreter (default python3), TORCH a PyTorch to install (torch==2.13.0).
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
base=${PYTHON:-python3} python=${PYTHON:-python3}
floor='((2, 4) if torch.cuda.device_count() else (2, 9))'  # Older gloo may hang when a job ends.
has_torch() { "$1" -c "import torch; assert torch.__version__ >= $floor" 2>/dev/null; }
lacks() { "$1" -c "import numpy" 2>/dev/null || echo numpy; has_torch "$1" || echo "PyTorch 2.4 (without GPUs 2.9)"; }
if [ -n "${TORCH-}$(lacks "$base")" ]; then
    "$base" -c 'import sys; sys.version_info < (3, 10) and sys.exit("PYTHON must be 3.10 or newer")'
    python=$here/.venv/bin/python
    if [ -n "${TORCH-}$(lacks "$python")" ]; then
        echo "run.sh: $base lacks" ${TORCH:-$(lacks "$base")}". Installing into $here/.venv, once:" \
            "on Linux a download of gigabytes, because CUDA's libraries come with PyTorch." >&2
        "$base" -m venv "$here/.venv"  # Debian and Ubuntu: package python3-venv
        "$python" -m pip install "${TORCH:-torch==2.13.0}" numpy >&2
    fi
fi
# Otherwise glibc gives the memory of large tensors back after each step: a quarter slower on a CPU.
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824
case ${1-} in test) shift; script=test_ddp_reference.py ;; programs) script=test_ddp_reference.py ;; esac
exec "$python" "$here/${script-ddp_reference.py}" "$@"
