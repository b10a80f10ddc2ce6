"""Real FSDP2 ranks load a model: every weight arrives, and no rank loads more than its rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from dapo_core.config.train import TrainConfig
from dapo_core.errors import ModelError
from dapo_core.machine.device import device_for
from dapo_core.merge.writer import shard_name
from dapo_core.model.folder import INDEX_FILE, SINGLE_FILE
from dapo_core.policy.model import load_sharded
from tests.ranks import run_ranks
from tests.tiny_models import ARCHITECTURES, build_tiny

CPU = device_for("cpu")
IDS = torch.arange(2, 42).view(2, 20)


class Logits(nn.Module):
    """The smallest FSDP2 root around a causal language model."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[b, T, V] logits."""
        return self.causal_lm(input_ids=token_ids, use_cache=False).logits


def _load(rank: int, path: Path, train: TrainConfig) -> dict[str, Any]:
    """Return the full weights, logits and gradients of the sharded model."""
    model = load_sharded(path, train, CPU, Logits)
    parameters = dict(model.causal_lm.named_parameters())
    weights = {
        name: parameter.full_tensor().detach().clone() for name, parameter in parameters.items()
    }
    logits = model(IDS)
    logits.logsumexp(-1).sum().backward()
    gradients = {name: parameter.grad.full_tensor() for name, parameter in parameters.items()}
    mesh = next(iter(parameters.values())).device_mesh
    return {
        "weights": weights,
        "logits": logits.detach(),
        "gradients": gradients,
        "mesh": tuple(mesh.shape),
    }


def _require_equal(rank: dict[str, Any], path: Path) -> None:
    """Assert that the full model equals the one that transformers loads from the folder."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    logits = model(IDS).logits
    logits.logsumexp(-1).sum().backward()
    torch.testing.assert_close(rank["logits"], logits.detach(), rtol=1e-5, atol=1e-5)
    parameters = dict(model.named_parameters())
    assert rank["weights"].keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert rank["weights"][name].dtype == torch.float32
        assert torch.equal(rank["weights"][name], parameter), name
        scale = float(parameter.grad.abs().max())
        torch.testing.assert_close(
            rank["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-5 * scale
        )


def _load_each(rank: int, cases: list[tuple[Path, TrainConfig]]) -> list[dict[str, Any]]:
    return [_load(rank, *case) for case in cases]


def test_every_architecture_loads_as_in_transformers(tmp_path: Path) -> None:
    """Tied or not, in one file or several; options that save time or memory change nothing."""
    plain, folder = TrainConfig(num_ranks=2), tmp_path
    cases = [
        (build_tiny(folder / f"{name}-{is_tied}", name, seed=3, tie_word_embeddings=is_tied), plain)
        for name in ARCHITECTURES
        for is_tied in (True, False)
    ]
    cases += [(cases[0][0], TrainConfig(num_ranks=2, gradient_checkpointing=False))]
    cases += [(cases[0][0], TrainConfig(num_ranks=2, reshard_after_forward=False))]
    cases += [(_in_bfloat16_files(build_tiny(folder / "files", "qwen3_moe", seed=6)), plain)]
    for results in run_ranks(2, _load_each, cases):
        for (path, _), result in zip(cases, results, strict=True):
            _require_equal(result, path)


def _in_bfloat16_files(path: Path) -> Path:
    """Convert the folder's weights to bfloat16, in two files with an index."""
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(path / SINGLE_FILE).items()}
    (path / SINGLE_FILE).unlink()
    names = sorted(tensors)
    places = {name: shard_name(1 + (number % 2), 2) for number, name in enumerate(names)}
    for place in set(places.values()):
        save_file({name: tensors[name] for name in names if places[name] == place}, path / place)
    index = {"metadata": {}, "weight_map": places}
    (path / INDEX_FILE).write_text(json.dumps(index), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("num_ranks", "fsdp_size", "mesh"),
    [
        (3, None, (3,)),  # uneven rows; 5 experts as 2 + 2 + 1
        (7, None, (7,)),  # more ranks than experts: empty shards
        (4, 2, (2, 2)),  # two copies of two shards
    ],
)
def test_sharding_and_replicas_do_not_change_the_model(
    tmp_path: Path, num_ranks: int, fsdp_size: int | None, mesh: tuple[int, ...]
) -> None:
    build_tiny(tmp_path, "qwen3_moe", seed=4)
    ranks = run_ranks(
        num_ranks, _load, tmp_path, TrainConfig(num_ranks=num_ranks, fsdp_size=fsdp_size)
    )
    assert {rank["mesh"] for rank in ranks} == {mesh}
    for rank in ranks:
        _require_equal(rank, tmp_path)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that any operation fills.

    What takes no memory is passed over: views, among them those of the mapped files, and tensors
    still empty, which transformers' constructors make whole.
    """

    num_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        aten = torch.ops.aten
        takes_none = function.is_view or function.overloadpacket in (
            aten.empty,
            aten.set_,
            aten.lift_fresh,
        )
        # a DTensor counts as its shard
        if type(result) is torch.Tensor and not result.is_meta and not takes_none:
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


def _largest(rank: int, path: Path, num_ranks: int) -> tuple[int, int]:
    """Return the bytes of the largest tensor while loading, and of all tensors afterwards."""
    with LargestTensor() as largest:
        model = load_sharded(path, TrainConfig(num_ranks=num_ranks), CPU, Logits)
    held = sum(parameter.to_local().untyped_storage().nbytes() for parameter in model.parameters())
    return largest.num_bytes, held


def test_a_rank_never_loads_more_than_its_rows(tmp_path: Path) -> None:
    build_tiny(tmp_path, "qwen3", seed=7)
    tensors = load_file(tmp_path / SINGLE_FILE)
    config = json.loads((tmp_path / "config.json").read_text())
    vocabulary = 4 * config["vocab_size"]
    tensors["model.embed_tokens.weight"] = torch.randn(vocabulary, config["hidden_size"])
    save_file(tensors, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary}))
    total = sum(tensor.nbytes for tensor in tensors.values())
    num_rows = -(-vocabulary // 8)  # of the largest parameter
    for largest, held in run_ranks(8, _largest, tmp_path, 8):
        assert held <= total / 8 * 1.1  # rows do not divide evenly
        assert largest <= num_rows * config["hidden_size"] * 4


def _change(path: Path, change: Any) -> None:
    tensors = load_file(path / SINGLE_FILE)
    change(tensors)
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})


@pytest.fixture
def one_rank(tmp_path: Path) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


UP = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors: tensors.pop("model.norm.weight"),
            r"not in the files: 1 \(model\.norm\.weight\), not in the model: 0\)",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.extra": torch.zeros(1)}),
            r"not in the files: 0, not in the model: 1 \(model\.layers\.0\.extra\)",
        ),
        (  # one matrix less, and its layer's other gate and up matrices are without their parameter
            lambda tensors: tensors.pop(UP),
            r"1 \(model\.layers\.1\.mlp\.experts\.gate_up_proj\), not in the model: 9 "
            r"\(model\.layers\.1\..*\)",
        ),
        (
            lambda tensors: tensors.update({UP: torch.zeros(2, 2)}),
            r"up_proj\.weight in .* has shape \[2, 2\], but the m",
        ),
    ],
    ids=["missing", "unexpected", "expert", "shape"],
)
def test_files_of_another_model_are_refused(
    tmp_path: Path, one_rank: None, change: Any, message: str
) -> None:
    build_tiny(tmp_path, "qwen3_moe")
    _change(tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_sharded(tmp_path, TrainConfig(), CPU, Logits)


def test_tied_and_computed_tensors_in_the_files_are_ignored(tmp_path: Path, one_rank: None) -> None:
    build_tiny(tmp_path, "llama", tie_word_embeddings=True)
    embedding = load_file(tmp_path / SINGLE_FILE)["model.embed_tokens.weight"]
    copies = {
        "lm_head.weight": embedding.clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
    }
    _change(tmp_path, lambda tensors: tensors.update(copies))
    model: Any = load_sharded(tmp_path, TrainConfig(), CPU, Logits).causal_lm
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight.full_tensor(), embedding)


def test_a_reference_model_is_not_trained(tmp_path: Path, one_rank: None) -> None:
    build_tiny(tmp_path, "qwen3_moe", seed=8)
    model = load_sharded(tmp_path, TrainConfig(dtype="bfloat16"), CPU, Logits, trainable=False)
    assert not model.training
    # root and two layers
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) == 3
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for (name, parameter), (_, other) in zip(
        model.causal_lm.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert not parameter.requires_grad
        assert torch.equal(parameter.full_tensor(), other), name
    with torch.no_grad():
        found, theirs = model(IDS), expected(IDS).logits
        exact = expected.float()(IDS).logits
    # the experts' sums are rounded in another order than in transformers, and no worse
    error, their_error = ((logits - exact).abs().mean() for logits in (found, theirs))
    assert 0 < error < 1.2 * their_error
