#!/usr/bin/env bash
# Makes .venv-rtx for `make test-tensorrt`: all of .venv, plus TensorRT-RTX. It needs no GPU.
# TensorRT itself is there with its bindings only, for tensorrt.plugin: its library is not on PyPI.
# --no-deps keeps Torch-TensorRT from replacing the CPU's PyTorch by CUDA's (5 GB).
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m venv .venv-rtx
shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$(.venv-rtx/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$shared')" >"$own/mtpbuild.pth"
version=1.7.1.116
.venv-rtx/bin/python -m pip install --quiet --no-deps \
    "tensorrt-rtx-cu13-libs==$version" "tensorrt-rtx-cu13-bindings==$version" \
    "tensorrt-rtx-cu13==$version" "tensorrt-rtx==$version" torch-tensorrt-rtx==2.13.0 \
    tensorrt-cu13-bindings==11.0.0.114 cuda-bindings==13.5.0 cuda-pathfinder dllist psutil
