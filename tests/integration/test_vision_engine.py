"""vLLM with pictures: log-probs equal transformers', and new weights reach the encoder's cache."""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dapo_core.config.train import LoraConfig
from dapo_core.engines.base import Engine, GenerationRequest, Response
from dapo_core.engines.factory import build_engine
from dapo_core.errors import ModelError, RolloutError
from dapo_core.model.folder import read_config
from dapo_core.model.inputs import ImageReference, ModelInput
from dapo_core.model.lora import adapter_name, adapter_names, adapter_shapes
from dapo_core.model.names import is_of_tower
from dapo_core.model.pictures import ImageProcessor
from tests.tiny_models import build_tiny, tiny_engine_settings
from tests.tiny_vision import FAMILIES, build_tiny_vision, write_picture
from tests.two_processes import engine_of_two_processes

pytest.importorskip("torchvision", reason="vLLM's models that read pictures import it")

SETTINGS = replace(tiny_engine_settings(), max_model_tokens=160)
TOLERANCE = 1e-4
SIZES = [[(40, 70)], [], [(64, 32), (33, 100)], [(32, 32)]]  # of the pictures of each prompt


@pytest.fixture(scope="module", params=FAMILIES)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision(tmp_path_factory.mktemp("vision"), request.param)


@pytest.fixture
def engine(model_path: Path) -> Iterator[Engine]:
    engine = build_engine("vllm", model_path, SETTINGS, seed=0)
    yield engine
    engine.close()


@pytest.fixture
def prompts(model_path: Path, tmp_path: Path) -> list[ModelInput]:
    return [_prompt(model_path, tmp_path, sizes) for sizes in SIZES]


def _prompt(model_path: Path, folder: Path, sizes: Sequence[tuple[int, int]]) -> ModelInput:
    """A prompt with a picture of each size between its texts."""
    processor = ImageProcessor(model_path)
    start, end = processor.token_id - 2, processor.token_id - 1
    ids, images = [40, 41, 42], []
    for number, size in enumerate(sizes):
        path = write_picture(folder / f"{size[0]}x{size[1]}-{number}.png", *size, seed=number)
        grid = processor.grid(path)
        count = processor.num_tokens(grid)
        images.append(ImageReference(str(path), grid, len(ids) + 1, count))
        ids += [start, *[processor.token_id] * count, end, 50 + number]
    return ModelInput((*ids, 60, 61), tuple(images))


def _finish(engine: Engine, prompts: Sequence[ModelInput], seed: int = 0) -> list[Response]:
    requests = [GenerationRequest(str(n), one, seed + n) for n, one in enumerate(prompts)]
    engine.submit(requests)
    found: dict[str, Response] = {}
    while engine.num_unfinished():
        found |= {response.request_id: response for response in engine.step()}
    return [found[request.request_id] for request in requests]


def _expected(
    model: Any, prompt: ModelInput, response_ids: Sequence[int], is_black: bool = False
) -> torch.Tensor:
    """Compute log-probs of a response with transformers, which finds positions by itself."""
    ids = torch.tensor([[*prompt.token_ids, *response_ids]])
    given: dict[str, Any] = {}
    if prompt.images:
        pixels, grids = ImageProcessor(model.config.name_or_path).pixels(prompt.images)
        kinds = torch.zeros_like(ids)
        for image in prompt.images:
            kinds[:, image.tokens] = 1
        pixels = pixels * (not is_black)
        given = {"pixel_values": pixels, "image_grid_thw": grids, "mm_token_type_ids": kinds}
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False, **given).logits[0]
    first = len(prompt.token_ids)
    log_probs = logits[first - 1 : -1].float().log_softmax(dim=-1)
    return log_probs.gather(1, ids[0, first:].unsqueeze(-1)).squeeze(-1)


def _family(model_path: Path) -> Any:
    return read_config(model_path)["model_type"]


def _model(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def _difference(model: Any, prompt: ModelInput, response: Response) -> float:
    expected = _expected(model, prompt, response.response_ids.tolist())
    return float((torch.from_numpy(response.rollout_log_probs) - expected).abs().max())


def test_sampled_and_given_responses_have_the_log_probs_of_transformers(
    engine: Engine, model_path: Path, prompts: list[ModelInput]
) -> None:
    model = _model(model_path)
    responses = _finish(engine, prompts)
    for prompt, response in zip(prompts, responses, strict=True):
        assert _difference(model, prompt, response) < TOLERANCE
    sequences = [(one, [7, 8, 9]) for one in prompts]
    for (prompt, ids), given in zip(sequences, engine.log_probs(sequences), strict=True):
        assert given == pytest.approx(_expected(model, prompt, ids).tolist(), abs=TOLERANCE)
    shown = [one for one in prompts if one.images]
    changes = [_expected(model, one, [7, 8], True) - _expected(model, one, [7, 8]) for one in shown]
    assert max(change.abs().max() for change in changes) > 0.5  # so the checks above see pictures


def test_new_weights_reach_pictures_that_were_read_before(
    engine: Engine, model_path: Path, prompts: list[ModelInput], tmp_path: Path
) -> None:
    """vLLM keeps the features of pictures, which are those of the old weights."""
    before = _finish(engine, prompts)
    other = build_tiny_vision(tmp_path / "other", _family(model_path), seed=1)
    engine.load_weights(load_file(other / "model.safetensors").items(), policy_version=1)
    model = _model(other)
    for prompt, old, new in zip(prompts, before, _finish(engine, prompts), strict=True):
        assert _difference(model, prompt, new) < TOLERANCE
        assert _difference(model, prompt, old) > 0.5


def test_an_engine_of_two_processes_reads_pictures_and_forgets_them_after_a_sync(
    tmp_path: Path,
) -> None:
    """Each process has its own cache of features."""
    paths = [build_tiny_vision(tmp_path / str(seed), seed=seed) for seed in range(2)]
    prompts = [_prompt(paths[0], tmp_path, sizes) for sizes in SIZES]
    sequences = [(prompt, [7, 8, 9]) for prompt in prompts]
    settings = replace(SETTINGS, tensor_parallel=2)
    with engine_of_two_processes(paths[0], settings, tmp_path) as engine:
        for version, path in enumerate(paths):
            if version:
                engine.load_weights(load_file(path / "model.safetensors").items(), version)
            model = _model(path)
            for prompt, response in zip(prompts, _finish(engine, prompts), strict=True):
                assert _difference(model, prompt, response) < TOLERANCE
            given = engine.log_probs(sequences)
            for (prompt, ids), found in zip(sequences, given, strict=True):
                expected = _expected(model, prompt, ids).tolist()
                assert found == pytest.approx(expected, abs=TOLERANCE)


def _require_log_probs(
    engine: Engine, prompts: list[ModelInput], model_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    """The engine has the log-probs of the model with other tensors in its files."""
    sequences = [(prompt, [7, 8, 9]) for prompt in prompts]
    found = engine.log_probs(sequences)
    engine.close()
    changed = model_path.with_name("changed")
    shutil.copytree(model_path, changed, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    model, old = _model(changed), _model(model_path)
    for (prompt, ids), given in zip(sequences, found, strict=True):
        expected = _expected(model, prompt, ids)
        assert given == pytest.approx(expected.tolist(), abs=TOLERANCE)
        assert (_expected(old, prompt, ids) - expected).abs().max() > 0.01
    shutil.rmtree(changed)


def test_a_frozen_tower_stays_beside_new_weights_of_the_decoder(
    model_path: Path, prompts: list[ModelInput]
) -> None:
    tensors = load_file(model_path / "model.safetensors")
    sent = {name: tensor + 0.02 for name, tensor in tensors.items() if not is_of_tower(name)}
    engine = build_engine("vllm", model_path, replace(SETTINGS, freezes_tower=True), seed=0)
    engine.load_weights(sent.items(), policy_version=1)
    _require_log_probs(engine, prompts, model_path, tensors | sent)


def test_an_adapter_of_the_decoder_has_the_names_of_the_files(tmp_path: Path) -> None:
    """Those of Qwen2.5-VL are not the modules'."""
    model_path, lora = build_tiny_vision(tmp_path / "m", "qwen2_5_vl"), LoraConfig(rank=8)
    tensors, draw = load_file(model_path / "model.safetensors"), torch.Generator().manual_seed(0)
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    adapter = {
        name: torch.randn(shape, generator=draw) * 0.1
        for name, shape in adapter_shapes(shapes, lora).items()
    }
    engine = build_engine("vllm", model_path, replace(SETTINGS, lora=lora), seed=0)
    sent = {adapter_name(name): tensor for name, tensor in adapter.items()}
    engine.load_weights(sent.items(), policy_version=1)
    for name in tensors:
        first, second = adapter_names(name)
        if first in adapter:
            tensors[name] = tensors[name] + lora.scale * adapter[second] @ adapter[first]
    prompts = [_prompt(model_path, tmp_path, sizes) for sizes in SIZES]
    _require_log_probs(engine, prompts, model_path, tensors)


def test_an_aborted_response_continues_with_its_pictures(
    engine: Engine, model_path: Path, prompts: list[ModelInput]
) -> None:
    engine.submit([GenerationRequest("x", prompts[2], 5)])
    for _ in range(4):
        engine.step()
    (part,) = engine.abort(["x"])
    so_far = part.response_ids, part.rollout_log_probs
    engine.submit([GenerationRequest("x", prompts[2], 5, *so_far)])
    while not (done := engine.step()):
        pass
    assert len(done[0].response_ids) > len(part.response_ids) > 0
    assert np.array_equal(done[0].response_ids[: len(part.response_ids)], part.response_ids)
    assert _difference(_model(model_path), prompts[2], done[0]) < TOLERANCE


def test_engines_that_read_no_pictures_refuse_them(
    model_path: Path, prompts: list[ModelInput], tmp_path: Path
) -> None:
    text = build_tiny(tmp_path / "text", "qwen3")
    for kind, error in (("hf", "2 pictures.*rollout.engine=vllm"), ("vllm", "reads none")):
        engine = build_engine(kind, text, SETTINGS, seed=0)  # type: ignore[arg-type]
        with pytest.raises((RolloutError, ModelError), match=error):
            engine.submit([GenerationRequest("x", prompts[2], 0)])
        with pytest.raises((RolloutError, ModelError), match=error):
            engine.log_probs([(prompts[2], [5])])
        engine.close()
