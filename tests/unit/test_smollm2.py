"""The second demo: weights in GGUF become the same model, and no held-out problem is trained on."""

import csv
from pathlib import Path
from typing import Any

import pytest

from dapo_core.demo import smollm2

VOCABULARY = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"0123456789+=", "Ġ", "Ċ", "Ġ+", "Ġ="]


def test_held_out_problems_and_their_mirror_images_are_not_trained_on(tmp_path: Path) -> None:
    train, held_out = smollm2.problems()
    # 40 * 41 / 2 = 820 sums and 18 * 19 / 2 = 171 products without order; 4 are examples
    unordered = {
        frozenset([text.split()[0], text.split()[2]]) | {text.split()[1]} for text, _ in train
    }
    tested = {
        frozenset([text.split()[0], text.split()[2]]) | {text.split()[1]} for text, _ in held_out
    }
    assert (len(unordered), len(tested)) == (820 + 171 - 4 - 400, 400)
    assert not unordered & tested
    smollm2.write_problems(tmp_path / "train.csv", train)
    with (tmp_path / "train.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(train) == len(dict(train))
    assert all(eval(row["problem"].strip(" =")) == int(row["answer"]) for row in rows)
    assert {row["subject"] for row in rows} == {"sum", "product"}


@pytest.mark.slow
def test_a_converted_model_computes_what_the_original_does(tmp_path: Path) -> None:
    """llama.cpp stores query and key rows in another order; a mistake there changes all logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    original = LlamaForCausalLM(config).bfloat16().eval()
    write_gguf(tmp_path / "model.gguf", original)
    smollm2.convert(tmp_path / "model.gguf", tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "12 + 3 = 15<|im_end|>\n"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    # digits alone; a blank joins the sign that follows it
    words = ["1", "2", "Ġ+", "Ġ", "3", "Ġ=", "Ġ", "1", "5", "<|im_end|>", "Ċ"]
    assert tokenizer.convert_ids_to_tokens(ids) == words
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert converted.dtype == torch.bfloat16
    with torch.no_grad():
        expected, found = (model(torch.tensor([ids])).logits for model in (original, converted))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def write_gguf(path: Path, model: Any) -> None:
    """Write a model as llama.cpp's converter does: neighbouring query and key rows are a pair."""
    from gguf import MODEL_ARCH, GGUFWriter, TokenType, get_tensor_name_map

    config, writer = model.config, GGUFWriter(path, "llama")
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config.num_hidden_layers)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(VOCABULARY)
    kinds = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(VOCABULARY) - 3)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ +", "Ġ ="])
    for add, token in (
        (writer.add_unk_token_id, 0),
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_pad_token_id, 2),
    ):
        add(token)
    writer.add_chat_template("{{ messages }}")
    for name, values in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        rows = values.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            halves = rows.reshape(-1, 2, config.head_dim // 2, rows.shape[1])
            rows = halves.swapaxes(1, 2).reshape(rows.shape)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", rows.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
