#!/usr/bin/env bash
# Cuts packages into pieces of 60 MB, for a GPU machine that takes no larger files:
# tools/gpu_pieces.sh VERSION PACKAGE..   here: fetches packages for Python VERSION into pieces/
# tools/gpu_pieces.sh --join FOLDER       there: joins pieces/, checks all, unpacks into FOLDER,
#                                         which is to stand first in PYTHONPATH
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[ -x "$python" ] || python=$(command -v python3)
if [ "$1" = --join ]; then
    cd pieces
    for first in *.whl.00; do
        [ -e "$first" ] || continue
        cat "${first%00}"?? >"${first%.00}"
        rm "${first%00}"??
    done
    sha256sum --check --quiet SHA256SUMS
    cd ..
    for wheel in pieces/*.whl; do "$python" -m zipfile -e "$wheel" "$2"; done
    exit
fi
version=$1
mkdir -p pieces
"$python" -m pip download --quiet --no-deps --dest pieces --only-binary=:all: \
    --python-version "$version" --implementation cp --abi "cp${version/./}" --abi abi3 --abi none \
    --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \
    "${@:2}"
cd pieces
sha256sum -- *.whl >SHA256SUMS
for wheel in *.whl; do
    [ "$(stat -c %s "$wheel")" -gt 60000000 ] || continue
    split -b 60000000 -d "$wheel" "$wheel."
    rm "$wheel"
done
ls -l
