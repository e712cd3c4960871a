# make run     build, and start an instance here (Ctrl-C ends it)
# make build   .venv with Midair in it, the C part compiled
# make test    every test that guards a promise (PYTEST_ARGS=... for some of all tests)
# make test-slow  the others: bench suite, drill, Spark, how pages look
# make check   style, types, C warnings, the native tests under ASan and UBSan, a minute of fuzzing
# make fuzz    what arrives on sockets, made up by fuzzers (FUZZ_ARGS=SECONDS, 60 without)
# make soak    storms of kills: a thousand and more (SOAK_ARGS=...)
# make test-systemd  boot a real systemd in a container, restart everything under load (root)
# make drill   upgrades and kills under load, checked and drawn (DRILL_ARGS=...)
# make spark   .venv with what the commands about traces need (pyspark, plotly; Java)
# make bench   measurements side by side with other brokers (BENCH_ARGS=...)
# make bench-native  the native pieces alone, timed (NATIVE_ARGS=...)
# make instructions  instructions per delivery, compared with bench/instructions.json

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# ninja makes the C part afterwards, in place.
PIP := MIDAIR_NATIVE_LATER=1 $(BIN)/pip install --quiet --disable-pip-version-check
NATIVE := $(wildcard native/src/*/*.[ch] native/src/*/*/*.[ch]) native/meson.build native/meson_options.txt \
          native/declarations.py native/build.py
ASAN := build/asan
ASAN_TESTS := $(wildcard tests/native/test_*.py) tests/wire/test_codec_nats.py
PYTHONS := midair router dispatcher connmgr native bench spark_jobs

.PHONY: build run drill spark test test-slow test-systemd soak check style types imports warnings asan fuzz model instructions bench bench-native clean
.DEFAULT_GOAL := build

build: $(BIN)/.native

run: build
	@$(BIN)/midair up

$(BIN)/.venv:
	@PYTHON=$(PYTHON) .ci/packages build
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(BIN)/.installed: pyproject.toml setup.py | $(BIN)/.venv
	@PYTHON=$(PYTHON) .ci/packages build
	$(PIP) setuptools cffi meson ninja --editable .
	@touch $@

$(BIN)/.native: $(NATIVE) $(BIN)/.installed
	$(BIN)/python native/build.py >/dev/null
	@touch $@

$(BIN)/.test: $(BIN)/.installed
	$(PIP) --editable '.[test,spark]'
	@touch $@

$(BIN)/.check: $(BIN)/.installed
	$(PIP) --editable '.[test,check]'
	@touch $@

$(BIN)/.peers: $(BIN)/.installed
	$(PIP) --editable '.[peers]'
	@touch $@

$(BIN)/.fuzz: $(BIN)/.installed
	$(PIP) --editable '.[test,fuzz]'
	@touch $@

$(BIN)/.spark: $(BIN)/.installed
	$(PIP) --editable '.[spark]'
	@touch $@

spark: build $(BIN)/.spark
	@.ci/packages spark

drill: spark
	$(BIN)/midair drill $(DRILL_ARGS)

# Side by side what can be, then what needs the machine for itself. Two at a time: a user's
# queue bytes (RLIMIT_MSGQUEUE, 819200) are enough for two instances of two connmgrs.
test: build $(BIN)/.test
	@.ci/packages test
ifdef PYTEST_ARGS
	$(BIN)/python -m pytest $(PYTEST_ARGS)
else
	@failed=0; \
	$(BIN)/python -m pytest -m 'not slow and not alone' -n 2 --dist loadfile || failed=1; \
	$(BIN)/python -m pytest -m 'alone and not slow' || failed=1; \
	exit $$failed
endif

test-slow: build $(BIN)/.test
	@.ci/packages test-slow
	$(BIN)/python -m pytest -m slow $(PYTEST_ARGS)

test-systemd: build $(BIN)/.test
	@PYTHON=/usr/bin/python3 .ci/packages build
	@.ci/packages systemd
	$(BIN)/python -m pytest tests/systemd/check_units.py tests/systemd/check_restarts.py

soak: build $(BIN)/.test
	$(BIN)/python -m tests.storm --kills 1000 $(SOAK_ARGS)

check: style types imports warnings asan fuzz model instructions

style: $(BIN)/.check
	$(BIN)/ruff check $(PYTHONS) tests
	$(BIN)/ruff format --check $(PYTHONS) tests

types: $(BIN)/.check
	$(BIN)/mypy

# Rooms import one way (the contracts are in pyproject.toml).
imports: $(BIN)/.check
	$(BIN)/lint-imports

# native/ has no build without warnings as errors.
warnings:
	@PYTHON=$(PYTHON) .ci/packages build
	gcc -std=c11 -D_GNU_SOURCE -Wall -Wextra -Werror -fno-strict-aliasing -fsyntax-only $(wildcard bench/*.c)

# Python itself is not instrumented, so the sanitizers' libraries must be loaded before it;
# what the interpreter does not free is not ours to find.
$(ASAN)/.built: $(NATIVE) $(BIN)/.installed
	@mkdir -p $(ASAN)
	$(BIN)/python native/build.py --sanitize --out $(ASAN) >/dev/null
	@touch $@

asan: $(ASAN)/.built $(BIN)/.check
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    ASAN_OPTIONS=detect_leaks=0 MIDAIR_NATIVE=$(ASAN) \
	    $(BIN)/python -m pytest -q $(ASAN_TESTS)

# AFL++ on the parser, Atheris on what reads sockets in Python (tests/fuzz/README.md).
fuzz: build $(BIN)/.fuzz
	@.ci/packages fuzz
	$(BIN)/python -m tests.fuzz $(FUZZ_ARGS)

model:
	@.ci/packages model
	$(PYTHON) docs/model/check.py

# A count that changed by more than 5% fails; INSTRUCTIONS_ARGS=--update writes the file anew.
instructions: build
	@.ci/packages instructions
	$(BIN)/python -m bench.instructions $(INSTRUCTIONS_ARGS)

# Without BENCH_ARGS also what tracing costs, which needs what the tracer needs.
bench: build $(BIN)/.peers $(if $(BENCH_ARGS),,$(BIN)/.spark)
	@.ci/packages bench
	$(BIN)/python -m bench.run $(BENCH_ARGS)
	$(if $(BENCH_ARGS),,$(BIN)/python -m bench.trace)

bench-native: build $(BIN)/.test
	$(BIN)/python -m pytest bench/bench_native.py --benchmark-only $(NATIVE_ARGS)

clean:
	rm -rf $(VENV) build *.egg-info compile_commands.json native/*.so
