#!/usr/bin/env bash
# One run on a GPU, in six commands of under 8 minutes that each leave JSON and a short table (docs/gpu.md):
# tools/gpu_run.sh [--smoke] [--out gpu_run] [preflight kernels rooflines tiny slice nccl]
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)
exec "$python" benchmarks/gpu_run.py "$@"
