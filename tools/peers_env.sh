#!/usr/bin/env bash
# Makes .venv-peers for benchmarks/peers.py: llama.cpp, compiled for this machine from its source
# package (15 minutes on 2 cores), and gguf to write its files.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m venv .venv-peers
CMAKE_ARGS="-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF" .venv-peers/bin/python -m pip install --quiet \
    --no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf==0.19.0
