# make demo    one real rollout with a scripted model; sets everything up first
# make quick   lint, types and a part of the tests, in about a minute
# make test    lint, types and the whole suite (CI=true runs the slow tests too)
# make soak    an hour of rollouts, kills and faults (SECONDS=120: two minutes); fails where something is lost or grows
SHELL := bash
RUN := .venv/bin/
CODE := src tests bench scripts

.PHONY: help setup develop demo quick test lint format build bench soak train-demo clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     set up what is missing and run one rollout with a scripted model"
	@echo "make quick    lint, types and the tests named in tests/quick.txt: about a minute"
	@echo "make test     set up what is missing and run lint, types and all tests (CI=true: the slow ones too)"
	@echo "make lint     lint and types only"
	@echo "make format   put the code into shape"
	@echo "make setup    set up only what rollouts need"
	@echo "make develop  set up what the tests need too"
	@echo "make build    build the two wheels into dist/"
	@echo "make bench    measure rollouts and boxes on this machine"
	@echo "make soak     wear a server out for an hour (SECONDS=120: two minutes)"
	@echo "make train-demo  a real RL run on this machine: vLLM, boxes, TRL; 4 GB to install, ten minutes or more (SEED=0)"
	@echo "make clean    remove the virtual environment and caches (not the rollouts)"
	@echo "make help     this list"

setup:
	@scripts/setup.sh

develop:
	@scripts/setup.sh dev

demo: setup
	@$(RUN)rollcage demo

lint: develop
	@$(RUN)ruff check $(CODE)
	@$(RUN)ruff format --check --quiet $(CODE) || { echo "some files are not in shape; run: make format" >&2; exit 1; }
	@$(RUN)mypy

format: develop
	@$(RUN)ruff check --fix --quiet $(CODE)
	@$(RUN)ruff format --quiet $(CODE)

quick: lint
	@$(RUN)pytest -q -n 3 --dist loadfile -m "not slow" @tests/quick.txt

# Most tests wait for something: a few files at a time take half as long. In CI, what fails gets a second chance.
test: lint
	@scripts/browser.sh
	@$(RUN)$(if $(filter true 1,$(CI)),python scripts/run_tests.py,pytest -m "not slow") -q -n 3 --dist loadfile

build: setup
	@$(RUN)pip wheel --quiet --no-deps --wheel-dir dist . ./src/opencode_env

bench: develop
	@$(RUN)python bench/rollout.py

soak: develop
	@$(RUN)python bench/soak.py --seconds $(or $(SECONDS),3600)

CACHE = $(shell $(RUN)python -c "from rollcage.settings import Settings; print(Settings.from_environ().cache_dir)")
SEED ?= 0
train-demo: setup
	@scripts/vllm.sh $(CACHE)/vllm-0.32.0
	@scripts/trainers.sh $(CACHE)/trainers-1
	@PYTHONPATH=src $(CACHE)/trainers-1/venv/bin/python examples/grpo/train.py \
		--engine $(CACHE)/vllm-0.32.0 --out build/train-demo-$(SEED) --seed $(SEED)

clean:
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
