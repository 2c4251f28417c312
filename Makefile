# tokenmill: what a fresh machine needs. Every target sets up .venv by itself; the second time that costs nothing.
PYTHON ?= python3
CONSTRAINTS ?= constraints/cpu.txt
RUN ?= serve
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
AXE := 4.14.1
NATIVE := $(wildcard csrc/*)
NEON_CXX ?= aarch64-linux-gnu-g++
NEON_RUN ?= qemu-aarch64

.DEFAULT_GOAL := help
.PHONY: help run test test-neon test-web test-clients test-reliability check fmt bench sanitize setup clean
LINTED := src tests tools bench examples train

help:
	@echo "make run      set up, build the CPU kernels, start 'tokenmill $(RUN)' with the demo model (RUN='serve demo' ...)"
	@echo "make test     set up, all CPU tests, then make check"
	@echo "make test-web     the page in Chromium, with how quick it is and axe-core (wants a quiet machine); pictures in out/web/"
	@echo "make test-clients      published clients (openai 2.x and 3.x, Node, langchain-openai) against 'serve demo'"
	@echo "make test-reliability  the long rows of the reliability table (about an hour; TOKENMILL_RELIABILITY_SECONDS shortens)"
	@echo "make test-neon         the AArch64 kernels, cross-compiled and emulated (apt-get install g++-aarch64-linux-gnu qemu-user)"
	@echo "make check    ruff, ruff format, mypy, import contracts and cycles, size ceilings"
	@echo "make fmt      format, and mend what ruff can"
	@echo "make bench    micro benchmarks of the CPU kernels -> out/bench-cpu.json (wants a quiet machine)"
	@echo "make sanitize the CPU kernels' tests under AddressSanitizer and UBSan"
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
	$(BIN)/pytest -n 2 --hypothesis-profile settled tests
	@$(MAKE) --no-print-directory check

test-clients: .venv/.native
	$(BIN)/python tests/clients/run.py

test-reliability: .venv/.native
	TOKENMILL_RELIABILITY=1 $(BIN)/pytest -s tests/reliability
	TOKENMILL_FUZZ_EXAMPLES=500 $(BIN)/pytest --timeout 3600 tests/pure/server/test_server_openapi.py

# Three machines: without dot products of bytes, with them, and with those of bf16 too.
test-neon: out/neon/compare
	for cpu in cortex-a53 neoverse-n1 max; do $(NEON_RUN) -cpu $$cpu out/neon/compare 20 || exit 1; done

out/neon/compare: $(NATIVE)
	@mkdir -p out/neon
	$(NEON_CXX) -std=c++17 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi -static -pthread -o $@ \
		$(filter-out csrc/bindings.cpp,$(wildcard csrc/*.cpp))

test-web: .venv/.native out/axe/package/axe.min.js
	$(BIN)/pytest tests/web --timed

# A development tool of the page's tests only: never served, never installed. Without npm that one test is skipped.
out/axe/package/axe.min.js:
	@mkdir -p out/axe
	@cd out/axe && npm pack --silent axe-core@$(AXE) >/dev/null && tar -xzf axe-core-$(AXE).tgz package/axe.min.js || \
		echo "== NOTE: npm could not fetch axe-core, so its test is skipped"

check: .venv/.native
	@echo "== ruff";   $(BIN)/ruff check -q $(LINTED)
	@echo "== format"; $(BIN)/ruff format -q --check $(LINTED)
	@echo "== mypy";   $(BIN)/mypy
	@echo "== import contracts"; $(BIN)/lint-imports
	@echo "== cycles"; $(BIN)/python tools/cycles.py
	@echo "== size";   $(BIN)/python tools/size.py

fmt: .venv/.native
	$(BIN)/ruff check -q --fix-only $(LINTED)
	$(BIN)/ruff format -q $(LINTED)

bench: .venv/.native
	@mkdir -p out
	$(BIN)/python bench/cpu/micro.py --json out/bench-cpu.json

# The kernels with AddressSanitizer and UBSan, installed aside, and their tests (compiling takes eight minutes of CPU).
# Twice: against the portable kernels without Python, then Python's tests of each instruction set.
sanitize: .venv/.installed out/sanitized/compare
	out/sanitized/compare 60
	$(PIP) install -q -c $(CONSTRAINTS) --no-deps --upgrade --target out/sanitized \
		-Ccmake.define.TOKENMILL_SANITIZE=ON -Cbuild-dir=build/sanitized .
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
		LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" \
		$(BIN)/python tools/sanitized.py out/sanitized -q tests/cpu/native tests/cpu/gguf/test_gguf_weight.py

out/sanitized/compare: $(NATIVE)
	@mkdir -p out/sanitized
	c++ -std=c++17 -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer \
		-ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi -Wno-ignored-attributes -pthread -o $@ \
		$(filter-out csrc/bindings.cpp,$(wildcard csrc/*.cpp))

clean:
	rm -rf .venv build
