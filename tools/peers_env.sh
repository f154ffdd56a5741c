#!/usr/bin/env bash
# Makes .venv-peers for benchmarks/peers.py, one_machine.py and serving.py. It has llama.cpp and its
# llama-server, compiled for this machine from the source package of llama-cpp-python (15 minutes on
# 2 cores).
# The build uses all of the processor's instructions but AMX: with weights repacked for AMX,
# llama.cpp 0.3.36 fails an assertion on this architecture; without repacking it is a third slower.
set -euo pipefail
cd "$(dirname "$0")/.."
version=0.3.36
options=(
    -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON '-DCMAKE_INSTALL_RPATH=$ORIGIN'
    -DLLAMA_BUILD_TOOLS=ON -DLLAMA_BUILD_SERVER=ON -DLLAMA_BUILD_APP=OFF
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF  # the build would download its page
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_OPENSSL=OFF
)
if [ -r /proc/cpuinfo ] && [ "$(uname -m)" = x86_64 ]; then
    has=" $(grep -m1 '^flags' /proc/cpuinfo | cut -d: -f2) "
    options+=(-DGGML_NATIVE=OFF)
    for pair in avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx512f:AVX512 \
        avx512_vnni:AVX512_VNNI avx512vbmi:AVX512_VBMI avx512_bf16:AVX512_BF16; do
        [[ $has == *" ${pair%%:*} "* ]] && state=ON || state=OFF
        options+=("-DGGML_${pair##*:}=$state")
    done
fi
.venv/bin/python -m venv .venv-peers
python=$PWD/.venv-peers/bin/python
$python -m pip install --quiet cmake ninja
# pip installs the bindings only; one compilation below serves them and llama-server.
CMAKE_ARGS=-DLLAMA_BUILD=OFF $python -m pip install --quiet \
    --no-binary llama-cpp-python llama-cpp-python==$version
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
$python -m pip download --quiet --no-deps --no-binary llama-cpp-python --dest "$work" llama-cpp-python==$version
tar xzf "$work"/llama_cpp_python-$version.tar.gz -C "$work"
source=$work/llama_cpp_python-$version/vendor/llama.cpp
PATH=$PWD/.venv-peers/bin:$PATH
cmake -S "$source" -B "$work/build" -G Ninja "${options[@]}"
cmake --build "$work/build" --target llama-server
libraries=$($python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/llama_cpp/lib
mkdir -p "$libraries"
cp -P "$work"/build/bin/*.so* "$work/build/bin/llama-server" "$libraries"
ln -sf "$libraries/llama-server" .venv-peers/bin/llama-server
