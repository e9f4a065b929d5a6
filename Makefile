# Everything happens in .venv, made on first use from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: install browser demo test test-all test-slow test-portable check docs dist clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say which with: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

# The tests of the report look at it in a headless browser; without one they are skipped.
browser:
	command -v chromium >/dev/null || { apt-get update -qq && \
		apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; }

demo: $(INSTALLED)
	$(BIN)/python -m anomaly demo

# A test file belongs to one process, of which there are as many as processors.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# What protects users, in minutes on two cores.
test: $(INSTALLED)
	$(PYTEST) -n auto --dist loadfile

# Everything.
test-all: test test-slow test-portable

# Real data, notebooks, Ray, exhaustive tables.
test-slow: $(INSTALLED)
	$(PYTEST) -n auto --dist loadfile -m slow

# The tests that rounding could turn, as older x86 processors compute.
test-portable: $(INSTALLED)
	$(BIN)/python tests/portable.py

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m benchmarks.structure

# The site, in site/: works from disk and asks nothing of a network.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'Look at site/index.html'

$(VENV)/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	touch $@

# The packages, in dist/: the wheel is built from the sdist, installed into an environment of its
# own, and the demo is run from there. Takes as long as installing torch does.
dist: $(INSTALLED)
	rm -rf dist build
	$(BIN)/python -c 'from setuptools.build_meta import build_sdist; build_sdist("dist")'
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w dist dist/*.tar.gz
	$(PYTHON) -m venv build/clean
	build/clean/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(echo dist/*.whl)[train]"
	cd build && clean/bin/anomaly demo
	rm -rf build
	@ls dist

clean:
	rm -rf $(VENV) runs/demo data/sample site build dist
