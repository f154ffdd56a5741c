# Everything happens in .venv: no activation, no set-up beyond python3.11+ and make.
PYTHON ?= python3
BIN := .venv/bin
WORKERS = -n 2 --dist loadgroup --no-loadscope-reorder  # tests/conftest.py has the order
PLATFORMS = manylinux_2_28_x86_64 manylinux_2_28_aarch64 macosx_14_0_arm64 win_amd64

.PHONY: venv run check fix test test-full test-tensorrt bench-check api-docs dist dist-all clean

venv: .venv/.installed

.venv/.installed: pyproject.toml setup.py tools/compile_kernels.py $(wildcard plugins/cpu/source/*)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable '.[cpu,build,dev]'  # setuptools' of editables
	touch $@

run: venv  ## build engines/tiny_n3 and stream text through it
	$(BIN)/mtpbuild build --model deepseek-tiny --nextn 3
	$(BIN)/mtpbuild run --engine engines/tiny_n3 --chat "What is 47 + 85?"

check: venv
	tools/check_links.sh
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror plugins/cpu/source/*.h plugins/cpu/source/*.cpp
	$(BIN)/mypy .typing/mtpbuild tests examples tools/*.py
	for scripts in benchmarks benchmarks/peer tools/train_tiny; do \
	    (cd $$scripts && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml *.py) || exit 1; done

fix: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i plugins/cpu/source/*.h plugins/cpu/source/*.cpp

test: venv  ## the suite, 6 to 11 minutes on 2 cores
	$(BIN)/pytest $(WORKERS) -m "not full"

test-full: venv  ## and the larger matrix; with PART=NAME one of its parts, each of at most an hour
	$(BIN)/pytest $(WORKERS) $(PART:%=--part=%)

test-tensorrt: venv  ## what needs TensorRT-RTX's packages, but no GPU; 0.3 GB in .venv-rtx
	test -d .venv-rtx || tools/tensorrt_rtx_env.sh
	.venv-rtx/bin/python -m pytest -m tensorrt

bench-check: venv  ## a few ratios beside the recorded ones; about 3 minutes, on a quiet machine
	$(BIN)/python benchmarks/check.py

api-docs: venv  ## the reference of the Python API, from its docstrings: build/api/mtpbuild/runtime.html
	$(BIN)/python tools/api_reference.py build/api

dist: .venv-dist/.installed  ## a wheel of this machine's kind and a source archive, in dist/
	rm -rf build dist
	.venv-dist/bin/python -m build --no-isolation --sdist --wheel > /dev/null
	rm -rf build *.egg-info
	ls -l dist

dist-all: .venv-dist/.installed  ## wheels for Linux, macOS and Windows, and a source archive
	rm -rf build dist
	.venv-dist/bin/python -m build --no-isolation --sdist > /dev/null
	for platform in $(PLATFORMS); do \
	    rm -rf build && .venv-dist/bin/python -m build --no-isolation --wheel \
	        --config-setting=--build-option=--plat-name=$$platform > /dev/null || exit 1; done
	rm -rf build *.egg-info
	ls -l dist

.venv-dist/.installed:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet build 'setuptools>=77' 'ziglang==0.17.*'
	touch $@

clean:
	rm -rf .venv .venv-dist .venv-rtx .venv-peers engines/*_n* engines/.*.building build dist *.egg-info
