#!/usr/bin/env bash
# Makes .venv-peers for benchmarks/peers.py: llama.cpp, compiled for this machine from its source
# package (15 minutes on 2 cores), and gguf to write its files.
# With all that the processor has but AMX: weights laid out for AMX end in an assertion of
# llama.cpp 0.3.36 on this architecture, and without such layouts it runs a third slower.
set -euo pipefail
cd "$(dirname "$0")/.."
options="-DLLAVA_BUILD=OFF -DMTMD_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF"
if [ -r /proc/cpuinfo ] && [ "$(uname -m)" = x86_64 ]; then
    has=" $(grep -m1 '^flags' /proc/cpuinfo | cut -d: -f2) "
    options+=" -DGGML_NATIVE=OFF"
    for pair in avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx512f:AVX512 \
        avx512_vnni:AVX512_VNNI avx512vbmi:AVX512_VBMI avx512_bf16:AVX512_BF16; do
        [[ $has == *" ${pair%%:*} "* ]] && state=ON || state=OFF
        options+=" -DGGML_${pair##*:}=$state"
    done
fi
.venv/bin/python -m venv .venv-peers
CMAKE_ARGS=$options .venv-peers/bin/python -m pip install --quiet \
    --no-binary llama-cpp-python llama-cpp-python==0.3.36 gguf==0.19.0
