"""Packed rows: their layout, and log-probs that do not depend on other sequences in the row."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from dapo_core.algorithm.batch import Batch, build_batch
from dapo_core.errors import ModelError
from dapo_core.machine.device import Cpu
from dapo_core.policy.attention import Packing, packed_attention
from dapo_core.policy.log_probs import TokenLogProbs
from dapo_core.policy.packing import pack
from dapo_core.policy.requirements import require_architecture, require_constant_rope
from tests.batches import make_group, one_by_one, random_batch

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    # far enough from uniform that a wrong neighbour shows in the log-probs
    "initializer_range": 0.2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"head_dim": 8},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "llama": {},
    "mistral": {"sliding_window": 5},  # most sequences of random_batch are longer
}


def _config(family: str, is_tied: bool = True) -> PretrainedConfig:
    return AutoConfig.for_model(family, **(SIZES | FAMILIES[family]), tie_word_embeddings=is_tied)


def _model(family: str, is_tied: bool = True) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return AutoModelForCausalLM.from_config(_config(family, is_tied), dtype=torch.float32)


def _alone(model: Any, batch: Batch, temperature: float) -> list[torch.Tensor]:
    """Log-probs and entropy of the response tokens by transformers, sequence by sequence: [M]."""
    return [values[batch.is_response] for values in one_by_one(model, batch, temperature)]


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def test_layout_matches_the_documented_example() -> None:
    """The example of PackedRow, with an empty response between."""
    sizes = [(2, 2), (3, 0), (1, 1)]  # of prompt and response
    groups = [
        make_group([1.0], number, response, prompt)
        for number, (prompt, response) in enumerate(sizes)
    ]
    batch = replace(
        build_batch(groups, mask_truncated=False),
        token_ids=torch.tensor([[5, 6, 7, 8], [9, 9, 9, 0], [3, 4, 0, 0]]),
    )
    row = pack(batch, CPU)
    assert row.token_ids.tolist() == [[5, 6, 7, 8, 9, 9, 9, 3, 4]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0, 1]]
    # response tokens are at 2, 3 and 8 of the row
    assert row.predictors.tolist() == [1, 2, 7]
    assert row.targets.tolist() == [7, 8, 4]
    assert row.cells.tolist() == [0, 1, 4]  # of [3, 2]: row 0 both, row 2 the first


def test_siblings_share_their_prompt_as_in_the_documented_example() -> None:
    batch = replace(
        build_batch([make_group([1.0, 1.0], 0, [2, 1], num_prompt_tokens=2)], mask_truncated=False),
        token_ids=torch.tensor([[5, 6, 7, 8], [5, 6, 4, 0]]),
    )
    row = pack(batch, CPU)
    assert row.token_ids.tolist() == [[5, 6, 7, 8, 4]]
    assert row.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert row.predictors.tolist() == [1, 2, 1]  # the prompt's last token predicts 7, and 4
    assert row.targets.tolist() == [7, 8, 4]
    assert row.places.tolist() == [0, 1, 2, 3, 0, 1, 4]
    assert row.cells.tolist() == [0, 1, 2]
    # the prompt alone; then both responses after it, the shorter one padded
    (prompt, responses) = row.packing.blocks
    assert (prompt.num_prompt_tokens, prompt.queries.tolist()) == (0, [0, 1])
    assert (responses.num_prompt_tokens, responses.queries.tolist()) == (2, [2, 3, 4, 0])
    assert responses.keys.tolist() == [0, 1, 2, 3, 0, 1, 4, 0]


def test_at_most_half_of_an_attention_block_is_padding() -> None:
    packing = Packing([3, 7, 1, 4], CPU)
    # 7 and 4 (2 * 4 >= 7) share a lane, 3 (6 < 7) begins the next, 1 (2 < 3) a third
    assert [(block.num_spans, block.num_tokens) for block in packing.blocks] == [
        (2, 7),
        (1, 3),
        (1, 1),
    ]
    assert packing.blocks[0].queries.tolist() == [3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 0, 0, 0]
    assert packing.blocks[1].queries.tolist() == [0, 1, 2]
    assert packing.blocks[2].queries.tolist() == [10]
    # the row's tokens 0-2 are in the second lane, which begins at 14; token 10 is in the third at
    # 17
    assert packing.positions.tolist() == [14, 15, 16, 0, 1, 2, 3, 4, 5, 6, 17, 7, 8, 9, 10]


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_packing_does_not_change_log_probs(family: str, is_tied: bool) -> None:
    batch = random_batch(num_groups=4, group_size=3, seed=2)
    assert len(set(batch.prompt_owners)) == 5  # row 8 alone keeps a prompt of its own
    plain, packed = _model(family, is_tied), TokenLogProbs(_model(family, is_tied), chunk_tokens=7)
    log_probs, entropy = packed(pack(batch, CPU), 0.8, True)
    expected_log_probs, expected_entropy = _alone(plain, batch, 0.8)
    torch.testing.assert_close(log_probs, expected_log_probs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    (log_probs.mean() + 0.3 * entropy.mean()).backward()
    (expected_log_probs.mean() + 0.3 * expected_entropy.mean()).backward()
    gradients, expected = _gradients(packed.causal_lm), _gradients(plain)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            gradient, expected[name], rtol=1e-4, atol=1e-6, msg=lambda text, n=name: n + text
        )


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operations made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                weakref.finalize(storage, self.sizes.pop, storage._cdata, None)
                self.sizes[storage._cdata] = storage.nbytes()
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def _peak_bytes(num_tokens: int, vocabulary: int, chunk_tokens: int) -> int:
    """Most bytes at once in a forward and a backward pass over one response, entropy included."""
    batch = build_batch(
        [make_group([1.0], 0, num_tokens, num_prompt_tokens=1)], mask_truncated=False
    )
    keys = SIZES | {"vocab_size": vocabulary, "max_position_embeddings": 1024}
    causal_lm = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3", **keys), dtype=torch.float32
    )
    model, row = TokenLogProbs(causal_lm, chunk_tokens), pack(batch, CPU)
    with LiveBytes() as live:
        log_probs, entropy = model(row, 1.0, True)
        (log_probs.sum() + entropy.sum()).backward()
    return live.peak


@pytest.mark.slow
def test_grouped_query_attention_equals_repeated_key_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight query heads a key head, as in Qwen3-32B; accelerators share."""
    lengths = [7, 5, 2]
    draw = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, sum(lengths), 8, generator=draw).bfloat16() for heads in (16, 2, 2)
    ]

    def attended(shares: bool) -> list[torch.Tensor]:
        monkeypatch.setattr(Cpu, "shares_key_heads", shares)
        given = [each.clone().requires_grad_() for each in states]
        packing = Packing(lengths, torch.device("cpu"))
        output, _ = packed_attention(
            torch.nn.Linear(1, 1), *given, None, packing=packing, scaling=0.35
        )
        output.backward(output.detach())
        return [output.detach(), *(each.grad for each in given if each.grad is not None)]

    for shared, repeated in zip(attended(True), attended(False), strict=True):
        torch.testing.assert_close(shared, repeated, rtol=0.02, atol=0.02)
    assert [each.shape for each in attended(True)[1:]] == [each.shape for each in states]


@pytest.mark.slow
def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    vocabulary = 151_936
    few, many = (_peak_bytes(num_tokens, vocabulary, chunk_tokens=16) for num_tokens in (64, 512))
    # the float32 logits of the further 448 tokens alone are 448 * 151,936 * 4 = 272 MB; their
    # activations in two layers 32 wide are a few MB
    assert many - few < 10e6
    # logits of a chunk are 16 * 151,936 * 4 = 9.7 MB, held a few times over; the head's gradient is
    # 19.4 MB
    assert many < 200e6


@pytest.mark.parametrize("option", ["softcap", "s_aux", "position_bias", None])
def test_attention_that_modifies_scores_is_refused(option: str | None) -> None:
    states = torch.zeros(1, 2, 4, 8)
    options = {"packing": Packing([4], CPU), option: 1.0} if option else {}
    with pytest.raises(ModelError, match="Linear modifies attention scores"):
        packed_attention(torch.nn.Linear(1, 1), states, states, states, None, **options)


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("bloom", {}, "bloom does not support custom attention"),
        ("qwen3_next", {}, "qwen3_next has layers of type linear_attention"),
        (
            "gemma2",
            {},
            r"gemma2 modifies logits after the output head \(final_logit_softcapping=30.0\)",
        ),
        ("granite", {"logits_scaling": 8.0}, r"granite .* \(logits_scaling=8.0\)"),
        ("cohere", {}, r"cohere .* \(logit_scale=0.0625\)"),
        ("t5", {}, "t5 is not a causal language model"),
        (
            "qwen3",
            {"num_attention_heads": 6},
            "qwen3 has 6 attention heads, .* train.sequence_parallel=4",
        ),
    ],
)
def test_unsupported_architectures_are_refused_with_the_reason(
    family: str, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        require_architecture(AutoConfig.for_model(family, **keys), sequence_parallel=4)


def test_rotations_that_depend_on_the_longest_sequence_of_a_row_are_refused() -> None:
    """As Phi-4-mini's beyond 4,096 tokens: in a packed row, log-probs move by nats."""
    factors = {f"{name}_factor": [1.0] * 8 for name in ("short", "long")}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 12}
    config = AutoConfig.for_model("llama", **SIZES, rope_parameters=rope | factors)
    require_constant_rope(config, 12)
    with pytest.raises(ModelError, match=r"llama .* of more than 12 tokens, .*_tokens = 13"):
        require_constant_rope(config, 13)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sequence_parallel", [1, 2, 4])
def test_supported_architectures_are_accepted(family: str, sequence_parallel: int) -> None:
    require_architecture(_config(family), sequence_parallel)
