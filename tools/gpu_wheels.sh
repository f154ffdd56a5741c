#!/usr/bin/env bash
# Fetches into wheels/ the packages that a GPU machine without a network needs beside its own
# PyTorch, Triton and NumPy: tools/gpu_wheels.sh [python version, 3.12]. Install them there with
# pip install --no-index --no-deps wheels/*.whl
# tools/gpu_wheels.sh --list prints what is fetched, without what that needs in turn.
set -euo pipefail
cd "$(dirname "$0")/.."
version=${1:-3.12}
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)
# The project's dependencies, without PyTorch and NumPy; setuptools installs the project itself.
wanted=$("$python" - <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
extra = project["optional-dependencies"]
tests = ["pytest>=8.3,<9.2", "pytest-xdist>=3.6", "hypothesis>=6.100", "psutil>=6", "setuptools>=77"]
named = [*project["dependencies"], *extra["build"], *extra["cpu"], *extra["serve"], *tests]
print("\n".join(name for name in named if not name.startswith(("torch", "numpy"))))
PY
)
if [ "$version" = --list ]; then
    echo "$wanted"
    exit
fi
mkdir -p wheels
echo "$wanted" >wheels/requirements.txt
"$python" -m pip download --quiet --dest wheels --only-binary=:all: \
    --python-version "$version" --implementation cp --abi "cp${version/./}" --abi abi3 --abi none \
    --platform manylinux2014_x86_64 --platform manylinux_2_31_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    -r wheels/requirements.txt
rm -f wheels/torch-* wheels/triton-* wheels/nvidia_* wheels/numpy-*
du -sh wheels
