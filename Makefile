# `make demo` and `make test` need python >= 3.10, g++ and make; everything else goes into .venv. A CUDA toolkit is used
# where there is one. An active virtual environment is left alone.
#
#   PYTHON=python3.12       the interpreter that .venv is made with
#   TORCH="torch==2.14.1"   another torch than the newest one (a pip requirement)
#   NANOVLLM_CUDA=0         build for the CPU only; 1 insists on the CUDA module

PYTHON ?= python3
TORCH ?= torch>=2.11
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
SOURCES := $(wildcard csrc/*.* csrc/*/*.*)
CUDA_ARCHS := 8.0 8.6 8.9 9.0a 10.0 12.0

.PHONY: demo test build model lint format archs clean
.DELETE_ON_ERROR:

demo: $(VENV)/.built $(MODEL)
	@echo 'nanovllm chat $(MODEL) --once "What is the capital of France?" --temperature 0'
	@$(VENV)/bin/nanovllm chat $(MODEL) --once "What is the capital of France?" --temperature 0
	@echo 'Next: $(VENV)/bin/nanovllm serve $(MODEL) --num-kvcache-blocks 64'
	@echo '      and open http://127.0.0.1:8000/inspector'

test: $(VENV)/.built $(VENV)/.test $(MODEL)
	$(PY) -m pytest -q

build: $(VENV)/.built

model: $(MODEL)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(SOURCES)

format: $(VENV)/.lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(SOURCES)

# The CUDA module for every architecture it is meant for; `make build` compiles those of the GPUs present.
archs: $(VENV)/.built
	NANOVLLM_CUDA=1 TORCH_CUDA_ARCH_LIST="$(CUDA_ARCHS)" $(PY) setup.py -q build_ext --inplace

clean:
	rm -rf $(VENV) build dist *.egg-info nanovllm/*.so .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: each says that what it stands for is in .venv.

$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.torch: | $(VENV)/.venv
	$(PIP) install -q "$(TORCH)" numpy "setuptools>=77" ninja
	@touch $@

# The first build goes through pip, as a user's does; a later one compiles what changed. Both are quiet unless they fail.
$(VENV)/.built: setup.py pyproject.toml $(SOURCES) | $(VENV)/.torch
	@if [ ! -e $@ ] || [ pyproject.toml -nt $@ ]; then \
	  echo '$(PIP) install -q --no-build-isolation -e .[server]   # compiles: some minutes'; \
	  PYTHONWARNINGS=ignore $(PIP) install -q --no-build-isolation -e '.[server]'; \
	else \
	  echo '$(PY) setup.py -q build_ext --inplace'; \
	  $(PY) setup.py -q build_ext --inplace > $(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }; \
	fi
	@touch $@

$(VENV)/.test: pyproject.toml | $(VENV)/.built
	$(PIP) install -q --group test
	@touch $@

$(VENV)/.lint: pyproject.toml | $(VENV)/.venv
	$(PIP) install -q --group lint
	@touch $@

$(MODEL): | $(VENV)/.venv
	$(PY) scripts/fetch_model.py
