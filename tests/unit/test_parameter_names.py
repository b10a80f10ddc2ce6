"""Mapping between transformers parameters and file tensors."""

import pytest
import torch

from dapo_core.config.train import LoraConfig
from dapo_core.errors import ModelError
from dapo_core.model.lora import adapter_name, adapter_shapes, base_name, is_adapter, parameter_name
from dapo_core.model.names import file_pieces, file_views, is_of_tower

QWEN3 = {
    f"model.layers.{layer}.{module}.weight": shape
    for layer in range(2)
    for module, shape in {
        "self_attn.q_proj": (8, 4),
        "self_attn.q_norm": (8,),
        "mlp.down_proj": (4, 6),
        "mlp.experts.0.gate_proj": (6, 4),
    }.items()
} | {"model.embed_tokens.weight": (9, 4), "lm_head.weight": (9, 4)}
EXPERTS = "model.layers.3.mlp.experts"
FILES = {
    f"{EXPERTS}.{expert}.{part}_proj.weight"
    for expert in range(2)
    for part in ("gate", "up", "down")
}


@pytest.mark.parametrize("name", ["model.norm.weight", f"{EXPERTS}.gate_up_proj"])
def test_a_parameter_with_the_same_name_maps_to_itself(name: str) -> None:
    whole = torch.zeros(2, 4, 3)
    views = file_views(name, whole, {name, "lm_head.weight"})
    assert list(views) == [name]
    assert views[name] is whole


def test_fused_experts_map_to_one_matrix_per_expert() -> None:
    # 2 experts, I = 2, H = 3: [2, 2I, H] holds gate rows 0-1 and up rows 2-3, so expert 1's gate
    # begins at 12
    gate_up = torch.arange(24.0).view(2, 4, 3)
    views = file_views(f"{EXPERTS}.gate_up_proj", gate_up, FILES)
    assert {name.removeprefix(f"{EXPERTS}."): view.tolist() for name, view in views.items()} == {
        "0.gate_proj.weight": [[0, 1, 2], [3, 4, 5]],
        "0.up_proj.weight": [[6, 7, 8], [9, 10, 11]],
        "1.gate_proj.weight": [[12, 13, 14], [15, 16, 17]],
        "1.up_proj.weight": [[18, 19, 20], [21, 22, 23]],
    }
    down = torch.arange(12.0).view(2, 3, 2)  # [2, H, I]
    views = file_views(f"{EXPERTS}.down_proj", down, FILES)
    assert {name: view.tolist() for name, view in views.items()} == {
        f"{EXPERTS}.0.down_proj.weight": down[0].tolist(),
        f"{EXPERTS}.1.down_proj.weight": down[1].tolist(),
    }


def test_views_share_the_parameters_memory() -> None:
    gate_up = torch.zeros(2, 4, 3)
    for number, view in enumerate(
        file_views(f"{EXPERTS}.gate_up_proj", gate_up, FILES).values(), start=1
    ):
        assert view.is_contiguous()
        view.fill_(number)
    assert gate_up[:, :, 0].tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]


def test_a_shard_starts_at_its_first_expert() -> None:
    last = file_pieces(f"{EXPERTS}.down_proj", (2, 3, 2), FILES)[-1]
    shard = torch.arange(6.0).view(1, 3, 2)  # expert 1 alone
    assert torch.equal(last.view(shard, first_expert=1), shard[0])


@pytest.mark.parametrize(
    ("name", "shape", "files"),
    [
        (f"{EXPERTS}.gate_up_proj", (3, 4, 3), FILES),  # a third expert that the files lack
        (f"{EXPERTS}.gate_up_proj", (2, 4, 3), FILES - {f"{EXPERTS}.1.up_proj.weight"}),
        ("model.layers.0.mlp.gate_up_proj.weight", (4, 3), {"model.layers.0.mlp.gate_proj.weight"}),
        ("model.norm.weight", (4,), {"norm.weight"}),
    ],
)
def test_a_parameter_missing_in_the_files_is_refused(
    name: str, shape: tuple[int, ...], files: set[str]
) -> None:
    assert file_pieces(name, shape, files) == []
    with pytest.raises(
        ModelError, match=rf"parameter {name} .* is not among the {len(files)} tensors"
    ):
        file_views(name, torch.zeros(shape), files)


def test_adapters_have_these_names_and_shapes() -> None:
    lora = LoraConfig(rank=2, targets=("q_proj", "down_proj"))
    shapes = adapter_shapes(QWEN3, lora)
    assert len(shapes) == 2 * 2 * 2
    assert shapes["model.layers.1.self_attn.q_proj.lora_A.default.weight"] == (2, 4)
    assert shapes["model.layers.0.mlp.down_proj.lora_B.default.weight"] == (4, 2)
    for name in shapes:
        assert is_adapter(name)
        assert parameter_name(adapter_name(name)) == name
    assert adapter_name("q_proj.lora_A.default.weight") == "base_model.model.q_proj.lora_A.weight"
    assert base_name("m.q_proj.base_layer.weight") == "m.q_proj.weight"
    assert not is_adapter("m.q_proj.base_layer.weight")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (
            ["q_prj"],
            r"names q_prj, .* no such matrix outside of experts; they have down_proj, q_proj$",
        ),
        (["q_norm"], "names q_norm"),  # a vector
        (["embed_tokens"], "names embed_tokens"),
        (["q_proj", "lm_head"], "names lm_head"),
        (["q_proj", "gate_proj"], r"names gate_proj, .* outside of experts"),
    ],
)
def test_a_target_without_an_adapter_is_named(targets: list[str], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        adapter_shapes(QWEN3, LoraConfig(rank=2, targets=tuple(targets)))


def test_names_of_models_that_read_pictures_map_to_those_of_published_files() -> None:
    language, tower = "model.language_model.norm.weight", "model.visual.merger.weight"
    for files in ({"model.norm.weight", "visual.merger.weight"}, {language, tower}):
        found = {name: file_pieces(name, (3,), files) for name in (language, tower)}
        names = [piece.file_name for pieces in found.values() for piece in pieces]
        assert set(names) == files
        assert [name for name in names if is_of_tower(name)] == names[1:]
    assert file_pieces("model.language_model.norm.weight", (3,), {"norm.weight"}) == []


def test_fused_experts_of_a_language_model_beside_a_tower_are_transposed_in_the_files() -> None:
    name = "model.language_model.layers.3.mlp.experts.gate_up_proj"
    whole = torch.arange(24.0).view(2, 4, 3)  # [E, 2I, H]
    [view] = file_views(name, whole, {name}).values()
    assert view.tolist() == whole.transpose(1, 2).tolist()
    view[1, 2, 3] = -1.0
    assert whole[1, 3, 2] == -1.0
