#!/usr/bin/env bash
# bash run.sh [options]   train; bash run.sh --help lists the options
# bash run.sh test, check [JOB.py] or programs: the tests, a check of a job, the README's programs
# PYTHON names an interpreter (default python3), TORCH a PyTorch to install (torch==2.13.0).
set -euo pipefail; unset CDPATH PYTHONOPTIMIZE PYTHONSAFEPATH
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd) base=${PYTHON:-python3} python=${PYTHON:-python3}
# Print what an interpreter lacks. An import that fails is shown, and ends this script.
lacks() { "$1" -c 'import sys; sys.path.pop(0)  # not what lies in this folder
from importlib.util import find_spec
if not find_spec("numpy") or not find_spec("torch"): sys.exit(print("NumPy or PyTorch"))
import numpy, os, torch; gpus = torch.cuda.is_available()  # says why not
if torch.__version__ < ((2, 6) if gpus else (2, 9)): sys.exit(print("PyTorch 2.9 (with GPUs 2.6)"))
if os.path.exists("/dev/nvidiactl") and not gpus and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.exit("PyTorch cannot use the GPU. Set TORCH to an older one, or CUDA_VISIBLE_DEVICES= to use the CPU")'; }
missing=${TORCH:-$(lacks "$base")}
[ -z "$missing" ] || python=$here/.venv/bin/python
if [ -n "$missing" ] && { [ -n "${TORCH-}" ] || [ ! -x "$python" ] || [ -n "$(lacks "$python")" ]; }; then
    echo "run.sh: $base lacks $missing. Installing into $here/.venv: downloads gigabytes on Linux." >&2
    "$base" -m venv "$here/.venv"  # Debian and Ubuntu: package python3-venv; Python 3.10 or newer
    "$python" -m pip install "${TORCH:-torch==2.13.0}" numpy >&2; lacks "$python" >&2
fi
# Otherwise glibc gives the memory of large tensors back after each step: a quarter slower on a CPU.
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824
case ${1-} in test) shift; script=test_ddp_reference.py ;; check | programs) script=test_ddp_reference.py ;; esac
exec "$python" "$here/${script-ddp_reference.py}" "$@"
