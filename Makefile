# tokenmill: what a fresh machine needs. Every target sets up .venv by itself; the second time that costs nothing.
# CONSTRAINTS=constraints/cpu.txt or cuda.txt chooses the build of torch; without it, nvidia-smi decides.
PYTHON ?= python3
RUN ?= serve
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check
INSTALL = $(PYTHON) tools/install.py $(if $(CONSTRAINTS),--constraints $(CONSTRAINTS))
AXE := 4.14.1
NATIVE := $(wildcard csrc/*)
NEON_CXX ?= aarch64-linux-gnu-g++
NEON_RUN ?= qemu-aarch64

.DEFAULT_GOAL := help
.PHONY: help run test test-nightly test-neon test-web test-clients test-reliability check fmt bench sanitize setup setup-tests clean
# Tests start hundreds of Pythons: the first one compiles what all import, whatever the shell says of it.
export PYTHONDONTWRITEBYTECODE :=
LINTED := src tests tools bench examples train

help:
	@echo "make run      set up, build the CPU kernels, start 'tokenmill $(RUN)' with the demo model (RUN='serve demo' ...)"
	@echo "make test     set up, all CPU tests, make check beside them"
	@echo "make test-nightly  the CPU tests with whole products of families, modes, fields and shapes (hours)"
	@echo "make test-web     the page in Chromium, with how quick it is and axe-core (wants a quiet machine); pictures in out/web/"
	@echo "make test-clients      published clients (openai 2.x and 3.x, Node, langchain-openai) against 'serve demo'"
	@echo "make test-reliability  a server under load and attack: docs/server.md (about an hour; TOKENMILL_RELIABILITY_SECONDS shortens)"
	@echo "make test-neon         the AArch64 kernels, cross-compiled and emulated (apt-get install g++-aarch64-linux-gnu qemu-user)"
	@echo "make check    ruff, ruff format, mypy, import contracts and cycles, size ceilings"
	@echo "make fmt      format, and mend what ruff can"
	@echo "make bench    micro benchmarks of the CPU kernels -> out/bench-cpu.json (wants a quiet machine)"
	@echo "make sanitize the CPU kernels' tests under AddressSanitizer and UBSan"
	@echo "make setup    only .venv, for running, and the native module; make setup-tests adds what tests and checks need"
	@echo "make clean    remove .venv and build/"

# What running needs, and what tests and checks need on top: done once, then these cost a tenth of a second.
setup:
	@$(INSTALL)

setup-tests:
	@$(INSTALL) --tests

run: setup
	@echo "== tokenmill $(RUN)"
	@$(BIN)/tokenmill $(RUN)

# A fault of the code fails twice. A test that fails only beside others is a fault of the test: this run ends well, and
# its last lines name it.
SUITE = $(BIN)/pytest --hypothesis-profile settled -o cache_dir=out/suite tests
AGAIN = { echo "== NOTE: these failed beside others and are asked once more, alone"; \
	$(SUITE) -n 0 --last-failed --last-failed-no-failures none --maxfail 3 -v; }

# Three on two cores, for a third of the time tests wait. Each begins with a third of the files, so that what the tests
# of a file share is made once; who has ended takes from the others.
SPREAD = -n 3 --dist worksteal

# Checks have one core to do for a minute or two. Beside tests they take what these leave, and print when all tests ended.
BESIDE = nice $(MAKE) --no-print-directory check

test: setup-tests
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || [ ! -d tests/web ] || \
		echo "== NOTE: no chromium here, so the web tests are skipped (apt-get install chromium)"
	@mkdir -p out
	@echo "== tests, and make check beside them"
	@$(BESIDE) > out/check.log 2>&1 & checks=$$!; trap "kill $$checks" INT TERM; \
	$(SUITE) $(SPREAD) --cache-clear; tests=$$?; \
	wait $$checks; checked=$$?; cat out/check.log; \
	[ $$tests = 0 ] || $(AGAIN); tests=$$?; exit $$((tests + checked))

# What `make test` thins out: every family in every mode, every shape in every field, four times the examples of the document.
test-nightly: setup-tests
	TOKENMILL_FAMILIES=1 TOKENMILL_FUZZ_EXAMPLES=25 $(BIN)/pytest -n 2 --timeout 3600 tests/cpu tests/pure tests/golden

test-clients: setup-tests
	$(BIN)/python tests/clients/run.py

test-reliability: setup-tests
	TOKENMILL_RELIABILITY=1 $(BIN)/pytest -s tests/reliability
	TOKENMILL_FUZZ_EXAMPLES=500 $(BIN)/pytest --timeout 3600 tests/pure/server/test_server_openapi.py

# Three machines: without dot products of bytes, with them, and with those of bf16 too.
test-neon: out/neon/compare
	for cpu in cortex-a53 neoverse-n1 max; do $(NEON_RUN) -cpu $$cpu out/neon/compare 20 || exit 1; done

out/neon/compare: $(NATIVE)
	@mkdir -p out/neon
	$(NEON_CXX) -std=c++17 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wno-psabi -static -pthread -o $@ \
		$(filter-out csrc/bindings.cpp,$(wildcard csrc/*.cpp))

test-web: setup-tests out/axe/package/axe.min.js
	TOKENMILL_FAMILIES=1 $(BIN)/pytest tests/web --timed

# A development tool of the page's tests only: never served, never installed. Without npm that one test is skipped.
out/axe/package/axe.min.js:
	@mkdir -p out/axe
	@cd out/axe && npm pack --silent axe-core@$(AXE) >/dev/null && tar -xzf axe-core-$(AXE).tgz package/axe.min.js || \
		echo "== NOTE: npm could not fetch axe-core, so its test is skipped"

check: setup-tests
	@echo "== ruff";   $(BIN)/ruff check -q $(LINTED)
	@echo "== format"; $(BIN)/ruff format -q --check $(LINTED)
	@echo "== mypy";   $(BIN)/mypy
	@echo "== import contracts"; $(BIN)/lint-imports
	@echo "== cycles"; $(BIN)/python tools/cycles.py
	@echo "== size";   $(BIN)/python tools/size.py

fmt: setup-tests
	$(BIN)/ruff check -q --fix-only $(LINTED)
	$(BIN)/ruff format -q $(LINTED)

bench: setup
	@mkdir -p out
	$(BIN)/python bench/cpu/micro.py --json out/bench-cpu.json

# The kernels with AddressSanitizer and UBSan, installed aside, and their tests (compiling takes eight minutes of CPU).
# Twice: against the portable kernels without Python, then Python's tests of each instruction set.
sanitize: setup-tests out/sanitized/compare
	out/sanitized/compare 60
	$(PIP) install -q --no-deps --upgrade --target out/sanitized \
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
