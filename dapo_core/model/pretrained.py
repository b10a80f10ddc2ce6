"""Loads configurations, tokenizers and models from Hugging Face folders, here alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dapo_core.errors import ConfigError, DapoError, ModelError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def load_model_config(model_path: str | Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the folder's model configuration; raises ModelError if it cannot be read."""
    from transformers import AutoConfig

    with model_errors(model_path, "has a config.json that transformers cannot read"):
        return AutoConfig.from_pretrained(
            str(model_path), local_files_only=True, trust_remote_code=trust_remote_code
        )


def read_tokenizer(
    model_path: str | Path, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load the folder's tokenizer, with or without a chat template; raises ModelError."""
    from transformers import AutoTokenizer

    with model_errors(model_path, "has no readable tokenizer"):
        return AutoTokenizer.from_pretrained(
            str(model_path), local_files_only=True, trust_remote_code=trust_remote_code
        )


def load_tokenizer(
    model_path: str | Path, trust_remote_code: bool = False, chat_template: str | Path | None = None
) -> PreTrainedTokenizerBase:
    """Load the folder's tokenizer, with the chat template from a file if given.

    Raises ModelError if the tokenizer cannot be read or has no chat template, ConfigError if the
    file cannot be read.
    """
    tokenizer = read_tokenizer(model_path, trust_remote_code)
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    if not tokenizer.chat_template:
        raise ModelError(
            f"the tokenizer in {model_path} has no chat template; use an instruction-tuned model, "
            "or set model.chat_template (dapo init: --chat-template) to a template file"
        )
    return tokenizer


def read_template(path: str | Path) -> str:
    """Return the text of model.chat_template; raises ConfigError if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template={path} cannot be read: {error}") from None


def reads_pictures(config: PretrainedConfig) -> bool:
    """Return whether a model with this configuration has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def _auto_class(config: PretrainedConfig) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM


def load_causal_lm(
    model_path: str | Path, dtype: torch.dtype, trust_remote_code: bool = False
) -> Any:
    """Load the folder's causal language model with its weights on the CPU; raises ModelError."""
    config = load_model_config(model_path, trust_remote_code)
    with model_errors(model_path, "cannot be loaded as a causal language model"):
        return _auto_class(config).from_pretrained(
            str(model_path),
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )


def empty_causal_lm(
    model_path: str | Path, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """Build the folder's causal language model with parameters on the meta device and real buffers.

    Raises ModelError if the folder is not a causal language model.
    """
    config = load_model_config(model_path, trust_remote_code)
    with (
        model_errors(model_path, "cannot be loaded as a causal language model"),
        _parameters_on_meta(),
    ):
        model = _auto_class(config).from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    return model


@contextmanager
def model_errors(model_path: str | Path, problem: str) -> Iterator[None]:
    """Turn any error inside the block into a ModelError: model files may contain anything."""
    try:
        yield
    except DapoError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ModelError(
                f"{model_path} needs its own Python files, which are not run by default; read "
                "them, and set model.trust_remote_code=true if you trust them"
            ) from error
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(
            f"{model_path} {problem}: {reason:.300}; correct its files, or fetch the model again"
        ) from error


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Register parameters on the meta device inside the block: with a shape, without memory."""
    from torch import nn
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def to_meta(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:  # a tied parameter stays the same object
            return None
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()
