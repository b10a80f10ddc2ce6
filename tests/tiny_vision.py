"""Folders of tiny models that read pictures, and pictures for them."""

from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from tests.tiny_models import tiny_tokenizer

Family = Literal["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"]
FAMILIES: tuple[Family, ...] = get_args(Family)
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PATCH, MERGE = 8, 2  # pixels and patches of a token's side
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# The hidden size is neither the experts' width nor twice it: a transposed expert has another shape.
_TEXT: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [8, 4, 4]}
_EMBEDDINGS = 10  # divides their variance, since log-probs of float32 are not exact when large
_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
}
_EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,  # as published; vLLM reads it, transformers always does it
}


def build_tiny_vision(
    path: str | Path,
    family: Family = "qwen3_vl",
    seed: int = 0,
    is_tied: bool = False,
    num_experts: int = 5,
) -> Path:
    """The folder `path`, filled with a random model of the family in float32 and its processor.

    Its weights have unit variance, so that a wrong position, picture or mask shows in log-probs.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

    folder, tokenizer = Path(path), tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(IMAGE_TOKENS)})
    tokenizer.chat_template = CHAT_TEMPLATE
    start, end, image, video = map(tokenizer.convert_tokens_to_ids, IMAGE_TOKENS)
    is_old = family == "qwen2_5_vl"
    rope = _ROPE if is_old else {**_ROPE, "mrope_interleaved": True}
    experts = {**_EXPERTS, "num_experts": num_experts}
    text = {**_TEXT, **(experts if family == "qwen3_vl_moe" else {})}
    if is_old:
        text["hidden_size"] = 128  # heads times head_dim
    vision = {**_VISION, "out_hidden_size": text["hidden_size"]}
    if is_old:
        vision |= {"window_size": 32, "fullatt_block_indexes": [1]}
    else:
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    config = AutoConfig.for_model(
        family,
        text_config={
            **text,
            "vocab_size": len(tokenizer),
            "rope_parameters": rope,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "bos_token_id": None,
            "tie_word_embeddings": is_tied,
        },
        vision_config=vision,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=is_tied,
        dtype="float32",
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                num_inputs = parameter.shape[-1] if parameter.ndim == 3 else parameter[0].numel()
                if "embed_tokens" in name:
                    num_inputs = _EMBEDDINGS
                torch.nn.init.normal_(parameter, std=num_inputs**-0.5)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":
        _transpose_experts(folder / "model.safetensors")
    tokenizer.save_pretrained(folder)
    _image_processor().save_pretrained(folder)
    return folder


def _transpose_experts(file: Path) -> None:
    """Write experts as published files have them; transformers saves them as it computes."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, file, {"format": "pt"})


def _image_processor() -> Any:
    from transformers import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 16 * 16, "longest_edge": 128 * 128}
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, size=size)


def write_picture(path: Path, width: int = 32, height: int = 32, seed: int = 0) -> Path:
    """A PNG of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path
