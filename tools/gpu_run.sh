#!/usr/bin/env bash
# Runs commands of under 8 minutes on a GPU; each writes JSON and a short table (docs/gpu.md):
# tools/gpu_run.sh [--smoke] [--out gpu_run] [preflight random rtx provider soak kernels ..]
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)
exec "$python" benchmarks/gpu_run.py "$@"
