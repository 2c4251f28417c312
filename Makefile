# tokenmill: what a fresh machine needs. Every target sets up .venv by itself; the second time that costs nothing.
PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
RUN ?= chat
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
NATIVE := $(wildcard csrc/*)

.DEFAULT_GOAL := help
.PHONY: help run test check bench setup clean

help:
	@echo "make run      set up, build the CPU kernels, start 'tokenmill $(RUN)' with the demo model (RUN='serve demo' ...)"
	@echo "make test     set up, all CPU tests, then make check"
	@echo "make check    ruff, ruff format, mypy, import contracts, size ceilings"
	@echo "make bench    micro benchmarks of the CPU kernels -> out/bench-cpu.json (wants a quiet machine)"
	@echo "make setup    only .venv and the native module"
	@echo "make clean    remove .venv and build/"

setup: .venv/.native

.venv/.installed: pyproject.toml $(CONSTRAINTS)
	@echo "== .venv: install tokenmill and its tools (a minute or two the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@touch .venv/.building
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[dev]'
	@mv .venv/.building .venv/.built
	@touch .venv/.installed

.venv/.native: .venv/.installed $(NATIVE)
	@if [ -n "$$(find csrc -newer .venv/.built -type f | head -1)" ]; then \
		echo "== csrc changed: rebuild the native module"; \
		touch .venv/.building; \
		$(PIP) install -q -c $(CONSTRAINTS) --no-deps -e . && mv .venv/.building .venv/.built; \
	fi
	@$(BIN)/python -c 'import tokenmill._native' 2>/dev/null || \
		echo "== NOTE: no native kernels (no C++ compiler, or csrc did not compile: $(PIP) install -v -e .); torch is used instead"
	@touch .venv/.native

run: .venv/.native
	@echo "== tokenmill $(RUN)"
	@$(BIN)/tokenmill $(RUN)

test: .venv/.native
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || [ ! -d tests/web ] || \
		echo "== NOTE: no chromium here, so the web tests are skipped (apt-get install chromium)"
	@echo "== tests"
	$(BIN)/pytest -n 2 tests
	@$(MAKE) --no-print-directory check

check: .venv/.native
	@echo "== ruff";   $(BIN)/ruff check -q src tests tools bench
	@echo "== format"; $(BIN)/ruff format -q --check src tests tools bench
	@echo "== mypy";   $(BIN)/mypy
	@echo "== import contracts"; $(BIN)/lint-imports
	@echo "== size";   $(BIN)/python tools/size.py

bench: .venv/.native
	@mkdir -p out
	$(BIN)/python bench/cpu/micro.py --json out/bench-cpu.json

clean:
	rm -rf .venv build
