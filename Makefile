# make train   set up .venv and train the digits        make test       set up .venv and run the tests
# make lint    format and types                         make test-all   the tests, and then the long campaigns
# make bench   the benchmarks, as ratios                make smoke      the tests of the main rooms
#
# make test PYTHON=python3.13   the same with another Python, in an environment of its own, .venv-3.13.
# Python 3.11 gets the oldest JAX that is supported (constraints.txt), later ones the newest (constraints-newest.txt).

PYTHON ?= python3
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
VENV := $(if $(filter file,$(origin PYTHON)),.venv,.venv-$(VERSION))
CONSTRAINTS := $(if $(filter 3.11,$(VERSION)),constraints.txt,constraints-newest.txt)
READY := $(VENV)/.ready

.PHONY: train test test-all smoke lint bench clean

train: $(READY)
	$(VENV)/bin/ftrain train configs/digits.toml

test: $(READY)
	$(VENV)/bin/python -m pytest

test-all: test
	$(VENV)/bin/python -m pytest --campaign -m campaign

smoke: $(READY)
	$(VENV)/bin/python -m pytest tests/checkpoints/test_manager.py tests/cli/test_commands.py tests/data tests/hooks \
		tests/optimizers/test_conformance.py tests/summaries tests/test_run.py tests/training

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright

bench: $(READY)
	$(VENV)/bin/python benchmarks/loop.py
	$(VENV)/bin/python benchmarks/optimizers.py
	$(VENV)/bin/python benchmarks/checkpoints.py
	$(VENV)/bin/python benchmarks/data.py
	$(VENV)/bin/python benchmarks/cluster.py

clean:
	rm -rf $(VENV) build dist *.egg-info

$(READY): pyproject.toml $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ftrain needs Python 3.11 or later: make PYTHON=python3.11")'
	@echo "setting up $(VENV): this takes a minute or two, once"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable ".[test,dev,examples]"
	@touch $@
