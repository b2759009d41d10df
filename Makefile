# make demo    one real rollout with a scripted model; sets everything up first
# make test    lint, types and the whole suite (CI=true runs the slow tests too)
SHELL := bash
RUN := .venv/bin/
CODE := src tests bench scripts

.PHONY: help setup develop demo test lint format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     set up what is missing and run one rollout with a scripted model"
	@echo "make test     set up what is missing and run lint, types and tests"
	@echo "make setup    set up only; make develop: with what the tests need"
	@echo "make lint     lint and types only"
	@echo "make format   put the code into shape"
	@echo "make bench    measure rollouts and boxes on this machine"
	@echo "make clean    remove the virtual environment and caches (not the rollouts)"

setup:
	@scripts/setup.sh

develop:
	@scripts/setup.sh dev

demo: setup
	@$(RUN)rollcage run examples/paginate.toml

lint: develop
	@$(RUN)ruff check $(CODE)
	@$(RUN)ruff format --check --quiet $(CODE) || { echo "some files are not in shape; run: make format" >&2; exit 1; }
	@$(RUN)mypy

format: develop
	@$(RUN)ruff check --fix --quiet $(CODE)
	@$(RUN)ruff format --quiet $(CODE)

# Most tests wait for something: a few files at a time take half as long.
test: lint
	@scripts/browser.sh
	@$(RUN)pytest -q -n 3 --dist loadfile $(if $(filter true 1,$(CI)),,-m "not slow")

bench: develop
	@$(RUN)python bench/rollout.py

clean:
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
