PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 7109

.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(BIN)/.ready: pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e . --group dev
	@touch $@

setup: $(BIN)/.ready ## Install everything into .venv

up: setup ## Start the demo service in the background
	@$(BIN)/mlx-stack up demo --port $(PORT) --if-needed

down: setup ## Stop it
	@$(BIN)/mlx-stack down

test: setup ## Everything that CI runs
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest

fast: setup ## The pure rooms only, in seconds
	@$(BIN)/python -m pytest -q tests/core tests/policy tests/text

shots: setup ## Redraw the dashboard pictures
	@$(BIN)/python -m pytest -q tests/tui --snapshot-update

bench: setup ## Measure, and print ratios against mlx-lm
	@$(BIN)/mlx-stack bench all

.PHONY: help setup up down test fast shots bench
