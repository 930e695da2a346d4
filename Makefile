# make demo: train a tiny K3 on this machine. make test: run the tests. Either sets up .venv first, once.
SHELL := bash
.DEFAULT_GOAL := help
.PHONY: help setup demo demo-sft test lint clean

BIN := .venv/bin
DEMO_ARGS ?=
TEST_ARGS ?=
# Two worker processes: one runs the tests on ranks, the other all else (tests/conftest.py).
TEST_WORKERS ?= -n 2 --dist loadscope

# No model hub is ever asked for anything: the corpus is made here and the tokenizer trained on it.
export HF_HUB_OFFLINE := 1

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | awk -F'\t' '{printf "  make %-8s %s\n", $$1, $$2}'
	@echo
	@echo "  DEMO_ARGS='run.name=short train.steps=50'  other values for make demo"
	@echo "  TEST_ARGS='-k router -x'    more arguments for pytest"
	@echo "  PYTHON=/path/to/python3.12  the Python to make .venv with"

setup: ## make .venv with the pinned packages (nothing to do when it is there)
	@PYTHON='$(PYTHON)' tools/setup/install.sh

demo: setup ## prepare the corpus, pretrain recipe=pretrain/k3-tiny, generate from its checkpoint
	@$(BIN)/python tools/prepare_demo.py --out data/demo
	@$(BIN)/k3train recipe=pretrain/k3-tiny $(DEMO_ARGS)
	@run_dir=$$($(BIN)/k3train recipe=pretrain/k3-tiny $(DEMO_ARGS) --cfg job --resolve | sed -n '/^run:/,/^[a-z]/s/^  dir: //p') && \
		echo && echo "A sample from $$run_dir:" && \
		$(BIN)/k3train generate --checkpoint "$$run_dir" --prompt "def "

demo-sft: setup ## fine-tune the run of make demo on made-up tasks; exact match before and after
	@$(BIN)/python tools/add_chat_tokens.py --tokenizer data/demo/tokenizer.json --out data/demo-chat --words
	@$(BIN)/python tools/make_tasks.py --out data/tasks
	@echo && echo "Held-out tasks before:"
	@$(BIN)/k3train eval --checkpoint runs/k3-tiny --tokenizer data/demo-chat --tasks data/tasks/tasks-held-out.jsonl --max-new-tokens 64
	@$(BIN)/k3train recipe=sft/k3-tiny
	@echo && echo "Held-out tasks after:"
	@$(BIN)/k3train eval --checkpoint runs/k3-tiny-sft --tasks data/tasks/tasks-held-out.jsonl --max-new-tokens 64

test: setup ## run the tests
	@$(BIN)/python -m pytest $(TEST_WORKERS) $(TEST_ARGS)

lint: setup ## check style
	@$(BIN)/ruff check .

clean: ## remove .venv, caches and build outputs; runs/ and data/ stay
	@rm -rf .venv build dist ./*.egg-info .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
