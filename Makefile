# Every command there is; each sets up what it needs.
#
#   make demo                       writes text with the model that ships with the package
#   make test                       the whole test suite, no GPU needed; what needs Triton once more on the newest one
#   make demo PYTHON=python3 VENV=  uses that Python as it is (torch and the rest installed already) and installs nothing
#
# PYTHON       the interpreter that makes the environment, 3.10 or newer
# VENV         the environment's folder; empty: none is made
# NEWEST       the Triton of the second pass, laid over the environment; empty: no second pass
# CONSTRAINTS  pinned versions; empty: the newest that pyproject.toml allows (the default where a GPU driver is found)

PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),,constraints-cpu.txt)
NEWEST ?= $(if $(filter Linux,$(shell uname -s)),3.9.0)
PROMPT ?= class Stack:
ARGS ?=

ifeq ($(strip $(VENV)),)
RUN := PYTHONPATH=.$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON)
else
RUN := $(VENV)/bin/python
BASE := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
BENCH := $(VENV)/.installed-bench
NEWER := $(if $(NEWEST),$(VENV)/triton-$(NEWEST))
endif

.PHONY: help demo test test-gpu sanitize bench lint
help:
	@sed -n 's/^#   //p' Makefile

demo: $(BASE)
	@printf '%s' "$(PROMPT)"
	@$(RUN) -m thalweg generate "$(PROMPT)" --temperature 0.5 --seed 1 --verify $(ARGS)

PYTEST = $(RUN) -m pytest -q -m "not gpu" $$($(RUN) -c 'import importlib.util as u; print("-n 2 --dist worksteal" * bool(u.find_spec("xdist")))')
test: $(DEV) $(if $(strip $(ARGS)),,$(NEWER))
	@$(PYTEST) $(ARGS)
ifneq ($(NEWER),)
	@$(if $(strip $(ARGS)),,PYTHONPATH=$(NEWER) $(PYTEST) $$(grep -lE '^(triton = )?pytest.importorskip' tests/test_*.py))
endif

test-gpu: $(DEV)
	@$(RUN) -m pytest -q -m gpu $(ARGS)

SANITIZER ?= compute-sanitizer
TOOLS ?= memcheck initcheck racecheck
sanitize: $(DEV)
	@for tool in $(TOOLS); do echo "$$tool"; PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(SANITIZER) --tool $$tool --error-exitcode 1 \
		$$([ $$tool = memcheck ] && echo --report-api-errors no) env SANITIZER_TOOL=$$tool $(RUN) tools/sanitize.py $(ARGS) || exit 1; done

bench: $(BENCH)
	@$(RUN) -m thalweg bench $(ARGS)

lint: $(DEV)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .

# The pinned versions first; where this machine cannot have them, whatever pyproject.toml allows.
PIP = $(VENV)/bin/python -m pip install -qq --no-compile --disable-pip-version-check
define install
@$(PYTHON) -m venv $(VENV)
@echo "Installing into $(VENV), once"
@$(if $(CONSTRAINTS),$(PIP) -c $(CONSTRAINTS) -e '.$(1)' 2>$(VENV)/install.log \
	|| { echo "$(CONSTRAINTS) cannot be met here ($(VENV)/install.log says why): taking the newest versions"; false; } \
	|| )$(PIP) -e '.$(1)'
@touch $@
endef

$(VENV)/triton-%: | $(DEV)
	@echo "Installing Triton $* into $@, once"
	@$(PIP) --no-deps --target $@.part triton==$* && rm -rf $@ && mv $@.part $@

$(VENV)/.installed: pyproject.toml $(wildcard constraints-cpu.txt)
	$(call install)
$(VENV)/.installed-dev: pyproject.toml $(wildcard constraints-cpu.txt)
	$(call install,[dev])
$(VENV)/.installed-bench: pyproject.toml $(wildcard constraints-cpu.txt)
	$(call install,[bench])
