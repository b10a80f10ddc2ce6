"""LoRA adapters in a transformers model: which weights get one, their names, and peft's files.

model                         q_proj.base_layer.weight, q_proj.lora_A.default.weight
model files                   q_proj.weight
adapter files and engines     base_model.model. + q_proj.lora_A.weight
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.errors import ModelError
from dapo_core.model.folder import model_fingerprint, read_config, require_model_folder
from dapo_core.model.names import file_name

if TYPE_CHECKING:
    import torch
    from torch import nn

    from dapo_core.config.train import LoraConfig

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
ADAPTER_FOLDER = "adapter"  # beside the weights of a merged model
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values of its max_lora_rank above 1
_FINGERPRINT = "base_fingerprint"
_PLAIN = {"peft_type": "LORA", "bias": "none"} | dict.fromkeys(
    "use_dora use_rslora modules_to_save rank_pattern alpha_pattern fan_in_fan_out lora_bias "
    "trainable_token_indices target_parameters layers_to_transform alora_invocation_tokens "
    "use_qalora layer_replication".split(),
    "",
)
# Values of init_lora_weights with which an adapter is on changed weights of its base model, until
# peft's save_pretrained converts it.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PREFIX, _BASE, _DEFAULT = "base_model.model.", ".base_layer.", ".default."
_ADAPTER = re.compile(r"\.lora_[AB]\.default\.weight$")
_LAYER_WEIGHT = re.compile(r".*\.layers\.\d+\..*?(?P<module>\w+)\.weight")


def base_name(name: str) -> str:
    """Return the name of a base weight without adapters; others unchanged."""
    return name.replace(_BASE, ".")


def is_adapter(name: str) -> bool:
    """Return whether a parameter of a model with adapters belongs to one."""
    return _ADAPTER.search(name) is not None


def adapter_name(name: str) -> str:
    """Return an adapter parameter's name in peft's files."""
    return _PREFIX + name.replace(_DEFAULT, ".")


def sent_name(name: str, file_names: Collection[str]) -> str:
    """Return an adapter parameter's name in engines, after its weight's in the model's files."""
    module, lora, rest = name.partition(".lora_")
    stored = file_name(f"{module}.weight", file_names).removesuffix(".weight")
    return adapter_name(stored + lora + rest)


def parameter_name(name: str) -> str:
    """Return the parameter that has this name in peft's files."""
    return re.sub(r"\.weight$", f"{_DEFAULT}weight", name.removeprefix(_PREFIX))


def adapter_names(weight: str) -> tuple[str, str]:
    """Return the parameters A [rank, in] and B [out, rank] of a model file's weight [out, in]."""
    module = weight.removesuffix("weight")
    return f"{module}lora_A{_DEFAULT}weight", f"{module}lora_B{_DEFAULT}weight"


def adapter_shapes(
    weights: Mapping[str, tuple[int, ...]], lora: LoraConfig
) -> dict[str, tuple[int, int]]:
    """Return the shapes of all adapter parameters for the weights of the model's files.

    Raises ModelError for a target that no decoder layer has outside of its experts.
    """
    found: dict[str, list[str]] = {}
    for name, shape in weights.items():
        if len(shape) == 2 and (match := _LAYER_WEIGHT.fullmatch(name)):
            found.setdefault(match["module"], []).append(name)
    usable = sorted(module for module in found if not any(".experts." in n for n in found[module]))
    if wrong := [target for target in lora.targets if target not in usable]:
        raise ModelError(
            f"train.lora.targets names {', '.join(wrong)}, but the decoder layers have no such "
            f"matrix outside of experts; they have {', '.join(usable)}"
        )
    shapes: dict[str, tuple[int, int]] = {}
    for name in (name for target in lora.targets for name in found[target]):
        first, second = adapter_names(name)
        shapes |= {first: (lora.rank, weights[name][1]), second: (weights[name][0], lora.rank)}
    return shapes


def add_adapters(
    model: nn.Module, weights: Mapping[str, tuple[int, ...]], lora: LoraConfig, on_meta: bool
) -> None:
    """Add float32 adapters to a causal language model, as the only trainable parameters.

    `weights` are the shapes of its files. New adapters change nothing; with `on_meta` they have no
    values. Raises ModelError like adapter_shapes, and for targets that are not linear modules.
    """
    import peft

    modules = {file_name(name, weights): name for name, _ in model.named_parameters()}
    weights = {modules.get(name, name): shape for name, shape in weights.items()}
    names = {name.partition(".lora_")[0] for name in adapter_shapes(weights, lora)}
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=sorted(names),
    )
    try:
        peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=on_meta)
    except ValueError as error:
        raise ModelError(
            f"peft cannot adapt {type(model).__name__} with train.lora.targets="
            f"[{', '.join(lora.targets)}]: {error}; remove the targets that it names"
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Compute without adapters in the block; peft's own switch would also change requires_grad."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers: list[Any] = [each for each in model.modules() if isinstance(each, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def first_values(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return an adapter parameter before training, as in peft: A is random, and B zero."""
    import torch

    bound = 0.0 if ".lora_B." in name else 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


def vllm_rank(lora: LoraConfig) -> int:
    """Return the smallest rank that vLLM can reserve for the adapter."""
    return min(rank for rank in VLLM_RANKS if rank >= lora.rank)


@dataclass(frozen=True)
class Adapter:
    """An adapter in peft's folder, or in a checkpoint."""

    folder: Path
    lora: LoraConfig
    base: Path  # model that it adapts


def write_adapter(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    lora: LoraConfig,
    base: str | Path,
    fingerprint: str = "",
) -> None:
    """Write an adapter of the model `base` as peft does; the names are those of adapter_name.

    The base model's fingerprint is in the metadata of the safetensors file.
    """
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    metadata = {"format": "pt", _FINGERPRINT: fingerprint}
    save_file(dict(tensors), folder / ADAPTER_FILE, metadata)
    (folder / ADAPTER_CONFIG).write_bytes(adapter_config(lora, base))


def adapter_config(lora: LoraConfig, base: str | Path) -> bytes:
    """Return the contents of adapter_config.json for an adapter of the model `base`."""
    values = {
        "base_model_name_or_path": str(Path(base).resolve()),
        "bias": "none",
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": sorted(lora.targets),
        "task_type": "CAUSAL_LM",
    }
    return (json.dumps(values, indent=2) + "\n").encode()


def is_adapter_folder(folder: Path) -> bool:
    """Return whether a folder is peft's of an adapter alone, not a model or a checkpoint."""
    files = folder / ADAPTER_CONFIG, folder / "config.json", folder / "tensor_names.json"
    return [path.is_file() for path in files] == [True, False, False]


def full_model(folder: str | Path) -> Path:
    """Return the base model's folder for an adapter's; others unchanged. Raises ModelError."""
    adapter = open_adapter(Path(folder))
    return Path(folder) if adapter is None else adapter.base


def open_adapter(folder: Path, base: Path | None = None) -> Adapter | None:
    """Return the adapter in peft's folder if it is one; None for a model.

    Raises ModelError if it is damaged, and like read_adapter.
    """
    from safetensors import SafetensorError, safe_open

    if not is_adapter_folder(folder):
        return None
    try:
        with safe_open(folder / ADAPTER_FILE, framework="numpy") as file:
            fingerprint = (file.metadata() or {}).get(_FINGERPRINT, "")
            names = [name.rpartition(".lora_")[0] for name in list(file.keys())]
            modules = {name.rpartition(".")[2] for name in names}
    except (SafetensorError, OSError) as error:
        path = folder / ADAPTER_FILE
        raise ModelError(f"{path} cannot be read ({error}); copy it again") from error
    return read_adapter(folder, fingerprint, base, modules)


def read_adapter(
    folder: Path, fingerprint: str, base: Path | None, modules: Collection[str] = ()
) -> Adapter:
    """Return the adapter that adapter_config.json describes, on `base` or the model that it names.

    modules: the adapted ones; else the file's target_modules. Raises ModelError for more than plain
    LoRA, and unless the base model exists and has the fingerprint, if any.
    """
    from dapo_core.config.train import LoraConfig

    path = folder / ADAPTER_CONFIG
    values = read_config(folder, ADAPTER_CONFIG)
    more = [
        f"{key}={values[key]}" for key in _PLAIN if (values.get(key) or _PLAIN[key]) != _PLAIN[key]
    ]
    if str(start := values.get("init_lora_weights")).startswith(_CHANGED_BASES):
        more.append(f"init_lora_weights={start}")
    if more:
        raise ModelError(
            f"{path} describes more than plain LoRA ({', '.join(more)}), which is not supported; "
            "merge the adapter into its base model with peft"
        )
    try:
        targets = tuple(sorted(modules or values["target_modules"]))
        lora = LoraConfig(rank=values["r"], alpha=values["lora_alpha"], targets=targets)
        base = base or Path(values["base_model_name_or_path"])
    except (KeyError, ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be used: {error!r}") from error
    way_on = "pass its folder to dapo merge --base"
    if modules:  # else a checkpoint, whose files must not change
        way_on = f"name its folder in {path} (base_model_name_or_path)"
    if not base.is_dir():
        raise ModelError(
            f"{folder} is an adapter of the model {base}, but this machine has no such folder; "
            f"{way_on}"
        )
    require_model_folder(base, f"base_model_name_or_path in {path}")
    if fingerprint and fingerprint != model_fingerprint(base):
        raise ModelError(
            f"{folder} was trained on another model than the one in {base} now; {way_on}"
        )
    return Adapter(folder, lora, base)
