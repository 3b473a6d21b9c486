# Needs python3 >= 3.11 and a package index. `make` lists the targets.

VENV := .venv
PYTHON := $(VENV)/bin/python
JOBS ?= 2
AGX ?= $(HOME)/.cache/mlx-tq/agx

# MLX's back end: part of it on macOS, an extra on Linux. `make test DEVICE=cpu` chooses by hand.
ifeq ($(shell uname -s),Linux)
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda13 || echo cpu)
endif
comma := ,
WITH_DEVICE := $(if $(DEVICE),$(comma)$(DEVICE))

.PHONY: help demo test test-slow test-archs lint bench agx wheel clean

help:
	@echo "make demo       a small model over its own cache and over a compressed one"
	@echo "make test       the tests (JOBS=$(JOBS) at a time)"
	@echo "make test-slow  all tests, also those that take minutes"
	@echo "make test-archs every architecture of mlx-lm, as tiny models"
	@echo "make lint       ruff, formatting included"
	@echo "make bench      attention over a cache against MLX's and mlx-lm's (BENCH=\"--help\" for its options)"
	@echo "make agx        what the kernels cost on Apple's instruction set (Linux and root only; AGX=folder of the compiler)"
	@echo "make wheel      wheel and source archive in dist/"
	@echo "make clean      removes $(VENV), dist and caches"

demo: $(VENV)/demo.stamp
	@$(PYTHON) -m mlx_tq.cli demo

test: $(VENV)/test.stamp
	@$(PYTHON) -m pytest -q -n $(JOBS)

test-slow: $(VENV)/test.stamp
	@$(PYTHON) -m pytest -q -n $(JOBS) -m ""

test-archs: $(VENV)/test.stamp
	@$(PYTHON) -m pytest -q -n $(JOBS) -m archs tests/test_archs.py

lint: $(VENV)/dev.stamp
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .

bench: $(VENV)/demo.stamp
	@$(PYTHON) benchmarks/attention.py $(BENCH)

agx: $(VENV)/demo.stamp
	@test -x "$(AGX)/root/src/mesa/build/src/asahi/clc/asahi_clc" || sh benchmarks/agx/build.sh "$(AGX)"
	@$(PYTHON) benchmarks/agx/agx.py --agx "$(AGX)" --out benchmarks/results/agx.csv

wheel: $(VENV)/dev.stamp
	@rm -rf dist
	@$(PYTHON) -m build --outdir dist
	@ls -l dist

clean:
	@rm -rf $(VENV) dist .pytest_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/demo.stamp: EXTRAS := lm$(WITH_DEVICE)
$(VENV)/test.stamp: EXTRAS := lm,test$(WITH_DEVICE)
$(VENV)/dev.stamp: EXTRAS := dev$(WITH_DEVICE)

# One stamp for each set of extras: installed again only when pyproject.toml changes.
$(VENV)/%.stamp: pyproject.toml | $(PYTHON)
	@echo "Installing mlx-tq[$(EXTRAS)] into $(VENV), which can take a few minutes the first time"
	@$(PYTHON) -m pip install -qq --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@

$(PYTHON):
	@found=; \
	for candidate in python3 python3.14 python3.13 python3.12 python3.11; do \
		if $$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
			found=$$candidate; break; \
		fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "error: Python 3.11 or newer is needed, and python3 is $$(python3 --version 2>&1 || true)" >&2; exit 1; \
	fi; \
	echo "Creating $(VENV) with $$($$found --version)"; \
	if ! $$found -m venv $(VENV); then \
		rm -rf $(VENV); \
		echo "error: '$$found -m venv' failed: on Debian and Ubuntu, install the package python3-venv" >&2; exit 1; \
	fi
