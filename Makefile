# tokenmill: what a fresh machine needs. Every target sets up .venv by itself; the second time that costs nothing.
PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
RUN ?= serve
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
NATIVE := $(wildcard csrc/*)

.DEFAULT_GOAL := help
.PHONY: help run test test-clients test-reliability check bench setup clean

help:
	@echo "make run      set up, build the CPU kernels, start 'tokenmill $(RUN)' with the demo model (RUN='serve demo' ...)"
	@echo "make test     set up, all CPU tests, then make check"
	@echo "make test-clients      published clients (openai 2.x and 3.x, Node, langchain-openai) against 'serve demo'"
	@echo "make test-reliability  the long rows of the reliability table (about an hour; TOKENMILL_RELIABILITY_SECONDS shortens)"
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
	@if [ ! -e .venv/.built ] || [ -n "$$(find csrc -newer .venv/.built -type f | head -1)" ]; then \
		echo "== csrc changed: rebuild the native module"; \
		touch .venv/.building; \
		$(PIP) install -q -c $(CONSTRAINTS) --no-deps -e . && mv .venv/.building .venv/.built; \
	fi
	@if $(BIN)/python -c 'import tokenmill._native' 2>/dev/null; then touch .venv/.native; \
	elif command -v c++ >/dev/null; then rm -f .venv/.built; \
		echo "== NOTE: csrc did not compile, so torch does the work; see: $(PIP) install -v --no-deps -e ."; \
	else touch .venv/.native; \
		echo "== NOTE: no C++ compiler here, so torch does the work of the native kernels"; fi

run: .venv/.native
	@echo "== tokenmill $(RUN)"
	@$(BIN)/tokenmill $(RUN)

test: .venv/.native
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || [ ! -d tests/web ] || \
		echo "== NOTE: no chromium here, so the web tests are skipped (apt-get install chromium)"
	@echo "== tests"
	$(BIN)/pytest -n 2 tests || { echo "== what failed, once more and one at a time (several tests time real processes)"; \
		$(BIN)/pytest --last-failed --last-failed-no-failures none tests; }
	@$(MAKE) --no-print-directory check

test-clients: .venv/.native
	$(BIN)/python tests/clients/run.py

test-reliability: .venv/.native
	TOKENMILL_RELIABILITY=1 $(BIN)/pytest -s tests/reliability
	TOKENMILL_FUZZ_EXAMPLES=500 $(BIN)/pytest --timeout 3600 tests/pure/server/test_server_openapi.py

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
