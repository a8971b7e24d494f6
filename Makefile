# Two commands need nothing but Python and make: `make demo` and `make test`.
# Another Python: `make test PYTHON=python3.13`.

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
RUN := $(VENV)/bin/python
ARGS ?=
EXAMPLES ?= 2000
TRANSPARENCY := tests/matrix tests/test_transparency.py tests/test_batches.py

.PHONY: demo test suite transparency fuzz lint format bench tables bench-gpu clean

demo: $(VENV)/examples  ## train a Transformer through a four-stage pipeline
	$(RUN) examples/train_text.py $(ARGS)

test: suite  ## all tests; those of transparency again on the newest Python found
	@newest=$$($(RUN) tests/newest_python.py $(VERSION)); \
	if [ -n "$$newest" ]; then $(MAKE) transparency PYTHON="$$newest"; \
	else echo "no Python after $(VERSION) here: the newest JAX was not tested"; fi

suite: $(VENV)/dev
	$(RUN) -m pytest -n 3 $(ARGS)

transparency: $(VENV)/dev
	$(RUN) -m pytest -n 2 $(TRANSPARENCY) $(ARGS)

fuzz: $(VENV)/dev  ## EXAMPLES random programs; with SEED those of an earlier run
	@seed=$(or $(SEED),$$(date +%s)); \
	echo "make fuzz EXAMPLES=$(EXAMPLES) SEED=$$seed"; \
	JPIPE_FUZZ_EXAMPLES=$(EXAMPLES) JPIPE_FUZZ_SEED=$$seed \
	$(RUN) -m pytest -n 2 tests/test_fuzz.py $(ARGS)

lint: $(VENV)/dev  ## style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

format: $(VENV)/dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(VENV)/examples  ## the figures of benchmarks/README.md
	$(RUN) -m benchmarks.overhead $(ARGS)
	$(RUN) -m benchmarks.schedules

tables: $(VENV)/examples  ## the published tables, at a scale for two cores
	$(RUN) -m benchmarks run --all --scale small $(ARGS)

# In the environment that is active: the one whose JAX finds the accelerator.
bench-gpu:  ## what accelerators show, as JSON, in nine minutes at most
	$(PYTHON) -m benchmarks.gpu $(ARGS)

clean:
	rm -rf .venv build *.egg-info

# An environment with an extra of pyproject.toml, made anew when that file changes.
$(VENV)/%: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
