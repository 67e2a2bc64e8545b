# `make properties` and `make test` do all the set-up themselves: a virtual environment with the
# exact versions of constraints.txt, then the run. A second call skips what is up to date.
#
#   make properties PROFILE=smoke ENGINE=torch_fsdp2 DEVICE=sim ARGS="-k gradient -x"

PROFILE ?= default
ENGINE ?= reference
DEVICE ?= cpu
ARGS ?=
MINUTES ?= 60
# verl needs an older transformers, so it has an environment of its own.
CONSTRAINTS := $(if $(filter verl,$(ENGINE)),constraints-verl.txt,constraints.txt)
VENV ?= $(if $(filter verl,$(ENGINE)),.venv-verl,.venv)
BASE_PYTHON ?= python3
PYTHON := $(VENV)/bin/python
export OMP_NUM_THREADS ?= 1

.PHONY: properties conformance nightly gpu-check test detection bench lint types layers check clean setup

properties: setup
	$(PYTHON) -m pytest properties/ -n auto --profile $(PROFILE) --engine $(ENGINE) \
	  --device $(DEVICE) $(ARGS)

# Every engine that is installed, one page: .reports/conformance/report.html. docs/conformance.md.
conformance: setup
	$(PYTHON) -m properties.conformance --profile $(PROFILE) --device $(DEVICE) $(ARGS)

# So many minutes of the nightly profile; reports and the page of all nights go to .reports/,
# failures and margins are kept below .hypothesis/ for the next night.
nightly: setup
	$(PYTHON) -m pytest properties/ -n auto --profile nightly --engine $(ENGINE) \
	  --device $(DEVICE) --minutes $(MINUTES) --report-json .reports/nightly.json \
	  --junitxml .reports/nightly.xml --nights .hypothesis/nights.jsonl $(ARGS)

# What a run on GPUs must show, as one table in at most eight minutes; 2: there is no GPU. docs/gpu.md.
gpu-check: setup
	$(PYTHON) -m tests.gpu_check $(ARGS)

test: setup
	$(PYTHON) -m pytest tests/ -n auto $(ARGS)

# Every planted fault with three seeds, down to its minimal case; also written to .reports/.
detection: setup
	$(PYTHON) -m tests.detection $(ARGS)

# Speed and sensitivity, one table; also written to .reports/. Never part of CI.
bench: setup
	$(PYTHON) -m tests.bench $(ARGS)

lint: setup
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	! grep -rnE "rtol|atol|allclose|isclose" oracles properties --include=*.py

types: setup
	$(VENV)/bin/mypy

layers: setup
	$(VENV)/bin/lint-imports

check: lint types layers test properties

setup: $(VENV)/.complete

$(VENV)/.complete: pyproject.toml $(CONSTRAINTS)
	$(BASE_PYTHON) -m venv $(VENV)
ifeq ($(ENGINE),verl)
	$(PYTHON) -m pip install --quiet --constraint $(CONSTRAINTS) torch setuptools
	$(PYTHON) -m pip install --quiet --no-deps --requirement $(CONSTRAINTS)
	$(PYTHON) -m pip install --quiet --no-deps --no-build-isolation --editable .
else
	$(PYTHON) -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
endif
	touch $@

clean:
	rm -rf $(VENV) .hypothesis .repro .reports build *.egg-info
