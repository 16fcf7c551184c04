# Every target does its own set-up: it makes a virtual environment in .venv
# (or reuses the one that is there) and installs what it needs into it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help demo test speed docs docs-test wheel-test lint format browser data clean
.NOTPARALLEL:

help:
	@echo "make demo    train a small model with differential privacy"
	@echo "make test    check style and run the tests"
	@echo "make speed   check that private training is not much slower than plain"
	@echo "make docs    write the reference from the docstrings"
	@echo "make docs-test run the code of README, docs and examples"
	@echo "make wheel-test build wheel and sdist, and try them in a clean place"
	@echo "make lint    check style only"
	@echo "make format  sort imports, fix and format the code"
	@echo "make browser install Chromium, with which the report is tested"
	@echo "make data    install Fashion-MNIST, which an example trains on"
	@echo "make clean   remove .venv, builds and caches"

demo: $(VENV)/.stamp-demo
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python examples/quickstart.py

test: lint
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/pytest -n 2 --dist worksteal --durations 20

speed: $(VENV)/.stamp-test
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -m benchmarks.guard

docs: $(VENV)/.stamp-test
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -m docs.make_api

docs-test: $(VENV)/.stamp-test
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/pytest -n 2 tests/test_readme.py \
	tests/test_docs.py tests/test_examples.py

# The wheel is built from the sdist, so that both are tried.
wheel-test: $(VENV)/.stamp-wheel
	rm -rf dist build/wheel-test
	$(BIN)/python -m build --outdir dist
	$(PYTHON) -m venv build/wheel-test
	build/wheel-test/bin/python -m pip install --quiet dist/*.whl
	build/wheel-test/bin/python -m pip check
	cp tests/smoke.py build/wheel-test/
	cd build/wheel-test && TF_CPP_MIN_LOG_LEVEL=3 bin/python smoke.py && \
	TF_CPP_MIN_LOG_LEVEL=3 bin/python -m keras_fastclip

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.stamp-test
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

browser:
	@command -v chromium || { test "$$(id -u)" = 0 && \
	apt-get update -qq && apt-get install -qq -y chromium; } || \
	echo "No Chromium, and no rights to install it: its tests are skipped."

# Without it the example downloads the data, where there is a network.
data:
	@test -d /usr/share/datasets/fashion-mnist || { test "$$(id -u)" = 0 && \
	apt-get update -qq && apt-get install -qq -y dataset-fashion-mnist; } || \
	echo "No Fashion-MNIST, and no rights to install it: Keras downloads it."

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say which extras are installed; they go stale when the
# dependencies may have changed.
$(VENV)/.stamp-%: setup.cfg pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or \
	sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
