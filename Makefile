# Two commands need nothing but Python and make: `make demo` and `make test`.
# Another Python: `make test PYTHON=python3.13`.

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := .venv/$(VERSION)
RUN := $(VENV)/bin/python
ARGS ?=
EXAMPLES ?= 2000
WORKERS ?= auto
BITS := tests/matrix tests/test_transparency.py tests/test_batches.py

.PHONY: demo test test-all bits hugging-face tasks libraries mutants fuzz docs serve notebook lint format bench \
	tables bench-gpu clean

demo: $(VENV)/examples  ## train a Transformer through a four-stage pipeline
	$(RUN) examples/train_text.py $(ARGS)

test: $(VENV)/dev  ## what a change needs to be trusted, in eight minutes on two cores
	$(RUN) -m pytest -n $(WORKERS) -m "not slow and not gpu" $(ARGS)

# The slow tests too, longer searches, the programs that XLA makes without the flags of
# tests/conftest.py, the models of Hugging Face, GPipe's tasks, other libraries,
# and the newest JAX.
test-all: $(VENV)/dev
	JPIPE_FUZZ_EXAMPLES=200 $(RUN) -m pytest -n $(WORKERS) -m "not gpu" \
		--hypothesis-profile=all $(ARGS)
	JPIPE_TESTS_FLAGS= $(RUN) -m pytest -n $(WORKERS) $(BITS) $(ARGS)
	$(MAKE) hugging-face VENV=$(VENV)-hugging-face
	$(MAKE) tasks VENV=$(VENV)-tasks
	$(MAKE) libraries VENV=$(VENV)-libraries
	@newest=$$($(RUN) tests/newest_python.py $(VERSION)); \
	if [ -n "$$newest" ]; then $(MAKE) bits PYTHON="$$newest"; \
	else echo "no Python after $(VERSION) here: the newest JAX was not tested"; fi

bits: $(VENV)/dev
	$(RUN) -m pytest -n $(WORKERS) $(BITS) $(ARGS)

hugging-face: $(VENV)/dev,hugging-face
	$(RUN) -m pytest -n $(WORKERS) tests/models/test_hugging_face.py $(ARGS)

tasks: $(VENV)/dev,tasks
	$(RUN) -m pytest -n $(WORKERS) tests/examples/test_transfer.py \
		tests/examples/test_translation.py $(ARGS)

libraries: $(VENV)/dev,libraries
	$(RUN) -m pytest -n $(WORKERS) tests/house/test_libraries.py $(ARGS)

mutants: $(VENV)/dev  ## faults that some test must notice, in two hours at most
	$(RUN) -m tests.mutants $(ARGS)

fuzz: $(VENV)/dev  ## EXAMPLES random programs; with SEED those of an earlier run
	@seed=$(or $(SEED),$$(date +%s)); \
	echo "make fuzz EXAMPLES=$(EXAMPLES) SEED=$$seed"; \
	JPIPE_FUZZ_EXAMPLES=$(EXAMPLES) JPIPE_FUZZ_SEED=$$seed \
	$(RUN) -m pytest -n $(WORKERS) --dist=worksteal tests/test_fuzz.py $(ARGS)

docs: $(VENV)/docs  ## the pages and the reference as a site in build/site
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet $(ARGS)
	$(RUN) docs/check_search.py

serve: $(VENV)/docs  ## the site on http://localhost:8000, written anew when a page changes
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs serve $(ARGS)

notebook:  ## the first tutorial as a notebook, from its page
	$(PYTHON) docs/notebook.py

lint: $(VENV)/dev  ## style and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m pyright --pythonpath $(RUN)

format: $(VENV)/dev
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: $(VENV)/examples  ## overhead.md and schedules.md of benchmarks/results, anew
	$(RUN) -m benchmarks.overhead $(ARGS)
	$(RUN) -m benchmarks.schedules

tables: $(VENV)/examples  ## the published tables, at a scale for two cores
	$(RUN) -m benchmarks run --all --scale small $(ARGS)

# In the environment that is active: the one whose JAX finds the accelerator.
bench-gpu:  ## what accelerators show, the most telling first, in nine minutes
	$(PYTHON) -m benchmarks.gpu $(ARGS)

clean:
	rm -rf .venv build *.egg-info

# An environment with an extra of pyproject.toml, made anew when that file changes.
$(VENV)/%: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@
