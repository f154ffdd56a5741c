#!/usr/bin/env bash
# Fetches what examples/other needs, into that folder: node_modules/ for generate.mjs; for
# generate.c onnxruntime/include (of a package of npm's that has the headers, 150 MB) and
# onnxruntime/lib (.venv's library). onnxruntime's own releases have both in one archive.
set -euo pipefail
cd "$(dirname "$0")/.."
capi=$(.venv/bin/python -c 'from importlib.util import find_spec as f; print(f("onnxruntime.capi").origin)')
library=$(ls "$(dirname "$capi")"/libonnxruntime.so.*)
cd examples/other
npm install --ignore-scripts --no-audit --no-fund --no-package-lock # its script would fetch CUDA
rm -rf onnxruntime && mkdir -p onnxruntime/include onnxruntime/lib
ln -s "$library" onnxruntime/lib/libonnxruntime.so
ln -s "$library" onnxruntime/lib/libonnxruntime.so.1
archive=$(npm pack --silent com.github.asus4.onnxruntime@0.4.9)
folder='package/Plugins/iOS~/onnxruntime.xcframework/ios-arm64_x86_64-simulator'
tar -xzf "$archive" -C onnxruntime/include --strip-components=7 \
    "$folder/onnxruntime.framework/Headers"
rm "$archive"
