# make train   set up .venv and train the digits        make test       set up .venv and run the tests
# make lint    format and types                         make test-all   the tests, and then the long campaigns
# make bench   the benchmarks, as ratios

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: train test test-all lint bench clean

train: $(READY)
	$(VENV)/bin/ftrain train configs/digits.toml

test: $(READY)
	$(VENV)/bin/python -m pytest

test-all: test
	$(VENV)/bin/python -m pytest --campaign -m campaign

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

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "ftrain needs Python 3.11 or later: make PYTHON=python3.11")'
	@echo "setting up $(VENV): this takes a minute or two, once"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[test,dev,examples]"
	@touch $@
