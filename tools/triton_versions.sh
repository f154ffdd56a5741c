#!/usr/bin/env bash
# Installs other versions of Triton, and NVIDIA's newer ptxas, beside .venv for the tests that count
# what kernels take with each (tests/plugins/test_resources.py, in `make test-full`); 0.9 GB.
set -euo pipefail
cd "$(dirname "$0")/.."
for version in 3.6.0 3.7.1; do
    .venv/bin/python -m pip install --quiet --no-deps --target ".triton/$version" "triton==$version"
done
.venv/bin/python -m pip install --quiet --no-deps --target .triton/nvcc nvidia-cuda-nvcc==13.4.59
