# One environment in .venv, made on first use and again whenever pyproject.toml or constraints.txt change.
# PYTHON picks the interpreter; TORCH another torch requirement (a CUDA build, say); CONSTRAINTS=/dev/null lifts all pins.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
CONSTRAINTS ?= constraints.txt
JOBS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Each of the JOBS test processes uses one thread: nested pools on a small machine are slower than none.
TEST := OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

.PHONY: demo test test-full lint format install clean

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

test: $(STAMP)
	$(TEST) -m "not slow" $(PYTEST_ARGS)

test-full: $(STAMP)
	$(TEST) $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: $(STAMP)

# torch goes in first and alone: a requirement that reaches it through another package may pick a much larger build.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet -c $(CONSTRAINTS) -e ".[dev,hf,demo]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis torch_compile_debug sp_compile_dump
	find . -name .git -prune -o \( -name '*.egg-info' -o -name __pycache__ \) -prune -exec rm -rf {} +
