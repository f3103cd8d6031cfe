#!/usr/bin/env bash
# Starts train_pippy.py on four processes of this machine: on GPUs if there are four, else on the CPU. Flags are passed on.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export PYTHONWARNINGS="ignore::FutureWarning:copyreg"  # of torch, about a class of its own
exec torchrun --standalone --nproc-per-node 4 "$(dirname "$0")/train_pippy.py" "$@"
