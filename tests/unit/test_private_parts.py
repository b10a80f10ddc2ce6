"""Private parts of Ray, torch, vLLM and transformers that the core uses: no public way exists.

Each fails here first when a library changes it; the comment at its use says why it is needed.
"""

import importlib
import inspect
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from torch import nn

from dapo_core.machine.environment import jemalloc


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_ray_still_binds_to_loopback_starts_processes_and_finds_clusters_as_expected() -> None:
    import ray
    from ray._private import ray_constants, services
    from ray._private.state import available_resources_per_node
    from ray._raylet import Config  # type: ignore[attr-defined]
    from ray.util import placement_group

    assert ray_constants.ENABLE_RAY_CLUSTER is True
    assert "ENABLE_RAY_CLUSTER" in inspect.getsource(services)  # replaces a loopback address
    assert "ConsolePopen(" in inspect.getsource(services.start_ray_process)
    assert parameters(services.canonicalize_bootstrap_address_or_die)[0] == "addr"
    assert parameters(available_resources_per_node) == []
    assert callable(Config.initialize)
    assert "_temp_dir" in inspect.getsource(ray.init)
    assert "_soft_target_node_id" in parameters(placement_group)


def test_ray_still_brings_the_jemalloc_that_keeps_a_rank_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    code = "print('libjemalloc' in open('/proc/self/maps').read())"
    run = [sys.executable, "-c", code]
    output = subprocess.check_output(run, env=os.environ | jemalloc(), text=True)

    assert output == "True\n"


def test_torch_still_makes_groups_beside_the_default_one_and_moves_parameters() -> None:
    from torch.distributed.distributed_c10d import _new_process_group_helper

    positional = ["group_size", "group_rank", "global_ranks_in_group", "backend", "store"]
    names = parameters(_new_process_group_helper)
    assert names[:5] == positional
    assert {"group_name", "timeout"} <= set(names)
    assert parameters(nn.Module._apply)[:2] == ["self", "fn"]


@pytest.mark.slow
def test_vllm_still_takes_the_rendezvous_of_a_part_from_its_executor() -> None:
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    assert parameters(ExecutorWithExternalLauncher._distributed_args) == ["self"]
    source = inspect.getsource(ExecutorWithExternalLauncher.__mro__[1])
    assert "distributed_init_method, rank, local_rank = self._distributed_args()" in source


@pytest.mark.slow
def test_vllm_still_has_an_engine_core_that_ends_with_its_processes() -> None:
    from vllm import LLMEngine
    from vllm.v1.engine.core_client import EngineCoreClient, InprocClient

    assert "self.engine_core = EngineCoreClient.make_client(" in inspect.getsource(LLMEngine)
    assert not parameters(InprocClient.shutdown)[2:]
    assert InprocClient.shutdown is not EngineCoreClient.shutdown


@pytest.mark.slow
def test_vllm_still_samples_in_its_model_runner_with_a_mode_of_log_probs() -> None:
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    from dapo_core.engines.vllm_engine import LOG_PROBS, set_logprobs_mode

    assert "self.sampler = Sampler(" in inspect.getsource(GPUModelRunner)
    assert "self.model_runner" in inspect.getsource(Worker)
    sampler = Sampler("raw_logprobs")  # what vllm-ascend's is, whatever the arguments say
    modes = [sampler.logprobs_mode, sampler.topk_topp_sampler.logprobs_mode]
    assert modes == ["raw_logprobs"] * 2
    set_logprobs_mode(SimpleNamespace(model_runner=SimpleNamespace(sampler=sampler)))
    modes = [sampler.logprobs_mode, sampler.topk_topp_sampler.logprobs_mode]
    assert modes == [LOG_PROBS] * 2


@pytest.mark.slow
def test_vllm_still_repeats_a_value_for_each_draft_by_this_function() -> None:
    import torch
    from vllm.v1.sample import rejection_sampler

    from dapo_core.engines.vllm_engine import expand_batch_to_tokens

    names = parameters(rejection_sampler.expand_batch_to_tokens)
    assert names[2:] == ["num_tokens", "replace_from", "replace_to"]
    source = inspect.getsource(rejection_sampler.apply_sampling_constraints)
    assert "expand_batch_to_tokens(" in source
    values, ends = torch.tensor([0.0, 0.7, 1.0]), torch.tensor([2, 2, 3], dtype=torch.int32)
    expanded = expand_batch_to_tokens(values, ends, 3, replace_from=0, replace_to=1)
    assert expanded.tolist() == [1.0, 1.0, 1.0]
    assert expand_batch_to_tokens(values, ends, 3).tolist() == [0.0, 0.0, 1.0]


@pytest.mark.slow
def test_vllm_still_packs_experts_and_a_head_where_the_core_packs_them_again() -> None:
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    method = inspect.getsource(unquantized_fused_moe_method.UnquantizedFusedMoEMethod)
    assert "self.moe_kernel.fused_experts.process_weights_after_loading(layer)" in method
    assert "def process_weights_after_loading(self, layer" in inspect.getsource(cpu_moe)
    assert "self.quant_method" in inspect.getsource(ParallelLMHead.__mro__[1])
    pack = vars(UnquantizedEmbeddingMethod)["process_weights_after_loading"]  # not the base's
    assert parameters(pack) == ["self", "layer"]


@pytest.mark.slow
def test_vllm_still_keeps_features_of_pictures_beside_parameters_and_buffers() -> None:
    for name in ("qwen3_vl", "qwen3_vl_moe"):
        source = inspect.getsource(importlib.import_module(f"vllm.model_executor.models.{name}"))
        assert "self.deepstack_input_embeds = [" in source


@pytest.mark.slow
def test_vllm_still_shows_the_experts_of_a_step_and_the_order_of_its_requests() -> None:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.worker.gpu_input_batch import InputBatch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert parameters(BaseRouter.set_capture_fn) == ["self", "capture_fn"]
    assert "self.capture_fn(topk_ids)" in inspect.getsource(BaseRouter)
    assert "self.router = " in inspect.getsource(MoERunner)
    assert parameters(GPUModelRunner.execute_model)[:2] == ["self", "scheduler_output"]
    assert isinstance(InputBatch.req_ids, property)
    source = inspect.getsource(InputBatch.__init__)
    assert "self.req_id_to_index" in source
    assert "self.num_computed_tokens_cpu = " in source
    assert "}-{random_uuid()" in inspect.getsource(InputProcessor)


@pytest.mark.slow
def test_vllm_still_returns_experts_by_layer_of_the_model() -> None:
    from vllm import EngineArgs, SamplingParams
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer
    from vllm.outputs import CompletionOutput

    from dapo_core.engines.vllm_routing import RETURNED

    assert RETURNED in EngineArgs.__dataclass_fields__
    assert "routed_experts" in CompletionOutput.__dataclass_fields__
    assert "routed_experts_prompt_start" in SamplingParams.__struct_fields__
    source = inspect.getsource(routed_experts_capturer.bind_routed_experts_capturer)
    assert "partial(capturer.capture, module.layer_id)" in source


@pytest.mark.slow
def test_vllm_still_returns_experts_to_the_first_part_alone() -> None:
    from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import InprocClient

    from dapo_core.engines.vllm_routing import leave_to_first_part

    worker = inspect.getsource(AuxOutputWorkerConnector)
    assert "if not get_tp_group().is_first_rank:\n            return" in worker
    assert "if self._buffer is None or metadata is None:\n            return" in worker
    assert "self.engine_core = EngineCore(" in inspect.getsource(InprocClient)
    assert "self.scheduler: " in inspect.getsource(EngineCore)
    source = inspect.getsource(Scheduler)
    assert source.count("self.aux_output_connector = (") == 1
    uses = source.count("self.aux_output_connector.")
    assert source.count("self.aux_output_connector is not None") == uses
    scheduler = SimpleNamespace(aux_output_connector="set")
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    leave_to_first_part(SimpleNamespace(engine_core=core))
    assert scheduler.aux_output_connector is None


@pytest.mark.slow
def test_peft_still_switches_adapters_off_by_this_flag() -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer

    assert BaseTunerLayer._disable_adapters is False
    assert "_disable_adapters" in inspect.getsource(vars(BaseTunerLayer)["disable_adapters"].fget)


@pytest.mark.slow
def test_vllm_still_accepts_these_adapter_ranks() -> None:
    from vllm.config.lora import MaxLoRARanks

    from dapo_core.model.lora import VLLM_RANKS

    assert set(VLLM_RANKS) <= set(get_args(MaxLoRARanks))


@pytest.mark.slow
def test_vllm_still_warns_of_reloads_under_the_silenced_name() -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    from dapo_core.engines import vllm_engine

    assert f'getLogger("{layerwise.logger.name}")' in inspect.getsource(vllm_engine)


def test_transformers_still_names_decoder_layers_skipped_tensors_and_packed_attention() -> None:
    from transformers import Glm4MoeForCausalLM, Qwen3ForCausalLM

    assert Qwen3ForCausalLM._no_split_modules
    assert Glm4MoeForCausalLM._keys_to_ignore_on_load_unexpected
    assert Qwen3ForCausalLM._supports_attention_backend is True


def test_transformers_still_multiplies_rows_by_expert_with_the_attributes_of_experts() -> None:
    from transformers.integrations.moe import _grouped_linear
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    names = ["input", "weight", "offs", "bias", "is_transposed"]
    assert parameters(_grouped_linear) == names
    sizes = {"hidden_size": 8, "moe_intermediate_size": 8, "num_experts": 2}
    experts = Qwen3MoeExperts(Qwen3MoeConfig(**sizes))
    assert (experts.has_gate, experts.has_bias, experts.is_transposed) == (True, False, False)
    assert parameters(experts._apply_gate) == ["gate_up_out"]


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen2_moe", "qwen3_moe"])
def test_transformers_routers_still_return_logits_scores_and_experts(family: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dapo_core.model.routers import ROUTERS, routers_of

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 8}
    experts = {"num_experts": 6, "num_local_experts": 6, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **sizes, **experts, num_key_value_heads=1, head_dim=8)
    routers = routers_of(AutoModelForCausalLM.from_config(config))
    assert len(routers) == 2
    assert type(routers[0]).__name__ in ROUTERS
    torch.nn.init.normal_(routers[0].weight)
    logits, scores, experts_chosen = routers[0](torch.randn(5, 16))
    assert logits.shape == (5, routers[0].num_experts)
    chosen = logits.softmax(dim=-1).gather(1, experts_chosen)
    if getattr(routers[0], "norm_topk_prob", True):
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(scores, chosen)
