#!/usr/bin/env bash
# bash run.sh [options]   train; bash run.sh --help lists the options
# bash run.sh test        run the tests
# bash run.sh check [JOB.py] [options]    is a job the same on any number of processes?
# bash run.sh programs    write the programs that the README shows
# PYTHON names an interpreter (default python3), TORCH a PyTorch to install (torch==2.13.0).
set -euo pipefail
unset CDPATH PYTHONOPTIMIZE
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
# Print what an interpreter lacks. An import that fails is shown, and ends this script.
lacks() { "$1" -c 'import sys; sys.path.pop(0)  # not what lies in this folder
from importlib.util import find_spec
if sys.version_info < (3, 10): sys.exit("PYTHON must be 3.10 or newer")
if not find_spec("numpy") or not find_spec("torch"): sys.exit(print("NumPy or PyTorch"))
import numpy, os, torch
gpus = torch.cuda.device_count()  # Without GPUs, older versions may hang when a job ends.
if torch.__version__ < ((2, 6) if gpus else (2, 9)): sys.exit(print("PyTorch 2.9 (with GPUs 2.6)"))
driver = os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
if driver and not gpus and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.exit("this PyTorch sees no GPU. To train on the CPU, set CUDA_VISIBLE_DEVICES= (nothing)")'
}
base=${PYTHON:-python3} python=${PYTHON:-python3}
missing=${TORCH:-$(lacks "$base")}
if [ -n "$missing" ]; then
    python=$here/.venv/bin/python
    if [ -n "${TORCH-}" ] || [ ! -x "$python" ] || [ -n "$(lacks "$python")" ]; then
        echo "run.sh: $base lacks $missing. Installing into $here/.venv, once: on Linux a download" \
            "of gigabytes, because CUDA's libraries come with PyTorch." >&2
        "$base" -m venv "$here/.venv"  # Debian and Ubuntu: package python3-venv
        "$python" -m pip install "${TORCH:-torch==2.13.0}" numpy >&2
    fi
fi
# Otherwise glibc gives the memory of large tensors back after each step: a quarter slower on a CPU.
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824
case ${1-} in test) shift; script=test_ddp_reference.py ;; check | programs) script=test_ddp_reference.py ;; esac
exec "$python" "$here/${script-ddp_reference.py}" "$@"
