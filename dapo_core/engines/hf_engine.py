"""Continuous batching for any transformers causal language model.

Rows are aligned at their last token. New requests are prefilled in waves, each distinct prompt
once, and then join the running batch. Finished rows are removed from the cache in groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import Cache, DynamicLayer

from dapo_core.engines.base import (
    Engine,
    EngineSettings,
    FinishReason,
    GenerationRequest,
    Response,
    Row,
    Sequences,
)
from dapo_core.engines.decode_attention import DECODE_ATTENTION
from dapo_core.errors import RolloutError
from dapo_core.memory.holdings import WEIGHTS
from dapo_core.model.lora import add_adapters, is_adapter, sent_name
from dapo_core.model.names import file_views, tied_names
from dapo_core.model.pretrained import load_causal_lm
from dapo_core.model.routers import Experts, RoutingRecord, routers_of
from dapo_core.model.sampling import Sampling, read_eos_ids
from dapo_core.model.tensors import read_headers, weight_names

PREFILL_TOKENS = 8192  # per wave, including padding
GROWTH_TOKENS = 64  # columns by which a cache grows
WAVE_SHARE = 0.25  # share of free rows that makes a prefill wave worthwhile
FINISHED_SHARE = 0.25  # share of finished rows that makes compaction worthwhile
# tensors of _Batch, one row each
_ROW_TENSORS = ("ids", "positions", "prompt_lengths", "uniforms", "sampling_numbers")


class _GrowingLayer(DynamicLayer):
    """Keys and values [N, heads, L, D] of a layer, with room so that appending does not copy.

    DynamicLayer copies for each token, which costs 14 % more CPU at 20 tokens a response, and more
    for longer ones.
    """

    keys: torch.Tensor
    values: torch.Tensor
    _key_buffer: torch.Tensor
    _value_buffer: torch.Tensor

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.replace(key_states, value_states)
            return self.keys, self.values
        start = self.keys.shape[-2]
        end = start + key_states.shape[-2]
        if end > self._key_buffer.shape[-2]:
            padding = (0, 0, 0, end - start + GROWTH_TOKENS)
            self._key_buffer = functional.pad(self.keys, padding)
            self._value_buffer = functional.pad(self.values, padding)
        self._key_buffer[:, :, start:end] = key_states
        self._value_buffer[:, :, start:end] = value_states
        self.keys = self._key_buffer[:, :, :end]
        self.values = self._value_buffer[:, :, :end]
        return self.keys, self.values

    def replace(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Set keys and values without spare capacity."""
        self.keys = self._key_buffer = keys
        self.values = self._value_buffer = values

    def select(self, rows: torch.Tensor, first_column: int = 0) -> None:
        """Keep only these rows and the columns from `first_column`."""
        keys, values = (
            part[:, :, first_column:].index_select(0, rows) for part in (self.keys, self.values)
        )
        self.replace(keys, values)


@dataclass
class _Batch:
    """Rows decoded together, all ending at the cache's last column; finished rows are None."""

    rows: list[Row | None]
    cache: Any  # of _GrowingLayer
    ids: torch.Tensor  # [N], newest tokens, not yet in the cache
    positions: torch.Tensor  # [N], of the newest tokens
    prompt_lengths: torch.Tensor  # [N]
    uniforms: torch.Tensor  # [N, R], random numbers of each response
    sampling_numbers: torch.Tensor  # [N], indices into the engine's list of samplings

    def num_live(self) -> int:
        return sum(row is not None for row in self.rows)

    def compact(self) -> None:
        """Remove finished rows and unused columns."""
        live = torch.tensor([index for index, row in enumerate(self.rows) if row is not None])
        live = live.to(self.ids.device)
        self.rows = [row for row in self.rows if row is not None]
        for name in _ROW_TENSORS:
            setattr(self, name, getattr(self, name)[live])
        first = self.cache.get_seq_length() - int(self.positions.max())
        for layer in self.cache.layers:
            layer.select(live, first)

    def join(self, other: _Batch) -> None:
        """Append the rows of another batch, aligned at the last column."""
        self.rows += other.rows
        for name in _ROW_TENSORS:
            setattr(self, name, torch.cat([getattr(self, name), getattr(other, name)]))
        for layer, more in zip(self.cache.layers, other.cache.layers, strict=True):
            layer.replace(_stack(layer.keys, more.keys), _stack(layer.values, more.values))


class HuggingFaceEngine(Engine):
    """Generation with transformers: runs wherever torch runs, but scales less well than vLLM."""

    def __init__(
        self, model_path: str | Path, settings: EngineSettings, device: str = "cpu"
    ) -> None:
        self._device = torch.device(device)
        self._file_names = weight_names(model_path)
        dtype = getattr(torch, settings.dtype)
        model: Any = load_causal_lm(model_path, dtype, settings.trust_remote_code)
        model.set_attn_implementation(DECODE_ATTENTION)
        self._has_adapter = settings.lora is not None
        if settings.lora is not None:
            sizes = {name: header.shape for name, header in read_headers(model_path).items()}
            add_adapters(model, sizes, settings.lora, on_meta=False)
        self._model = model.to(self._device).eval()
        self._experts: list[torch.Tensor] = []  # of each layer in the last pass: [n, K]
        for router in routers_of(model) if settings.records_routing else ():
            router.register_forward_hook(lambda _, __, outputs: self._experts.append(outputs[2]))
        self._views = self._by_file_name()
        shapes = {name: tuple(view.shape) for name, view in self._views.items()}
        super().__init__(settings, shapes, tied_names(self._model))
        self._stop_ids = set(read_eos_ids(model_path))
        if self._device.type == "cpu":
            torch.set_num_threads(settings.threads)
        self._max_rows = min(settings.max_num_seqs, self._rows_that_fit())
        self._waiting: deque[Row] = deque()
        self._batch: _Batch | None = None
        self._samplings: list[Sampling] = []  # distinct samplings seen so far

    @torch.inference_mode()
    def step(self) -> list[Response]:
        num_free = self._max_rows - (self._batch.num_live() if self._batch else 0)
        if self._waiting and num_free >= min(len(self._waiting), WAVE_SHARE * self._max_rows):
            return self._admit(num_free)
        return self._decode(self._batch) if self._batch else []

    def close(self) -> None:
        self._rows.clear()
        self._waiting.clear()
        self._batch = None
        self._model = None
        self._views = {}

    def _queue(self, row: Row) -> None:
        if self.settings.records_routing:
            row.routing = RoutingRecord(row.request.routing)
        self._waiting.append(row)

    def _drop(self, request_ids: Collection[str]) -> None:
        self._waiting = deque(
            row for row in self._waiting if row.request.request_id not in request_ids
        )
        if self._batch is not None:
            self._batch.rows = [
                None if row is None or row.request.request_id in request_ids else row
                for row in self._batch.rows
            ]
        self._shrink()

    @torch.no_grad()
    def _replace_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._views[name].copy_(tensor)

    def _sleep(self) -> None:
        self._move(torch.device("cpu"))

    def _wake(self, states: Sequence[str]) -> None:
        if WEIGHTS in states:
            self._move(self._device)

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        self._views = self._by_file_name()
        if self._device.type != "cpu":
            getattr(torch, self._device.type).empty_cache()

    def _by_file_name(self) -> dict[str, torch.Tensor]:
        """Return what is replaced by file name: the adapter, or all parameters.

        Tied parameters are under each of their names.
        """
        if self._has_adapter:
            parameters = self._model.named_parameters()
            adapters = {n: each.detach() for n, each in parameters if is_adapter(n)}
            return {sent_name(n, self._file_names): each for n, each in adapters.items()}
        names = self._file_names | tied_names(self._model).keys()
        views: dict[str, torch.Tensor] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            views |= file_views(name, parameter.detach(), names)
        return views

    @torch.inference_mode()
    def _log_probs(self, sequences: Sequences) -> list[list[float]]:
        results: list[list[float]] = []
        for prompt, response_ids in sequences:
            token_ids = torch.tensor([[*prompt.token_ids, *response_ids]], device=self._device)
            logits = self._model(
                input_ids=token_ids, use_cache=False, logits_to_keep=len(response_ids) + 1
            ).logits
            log_probs = logits[0, :-1].float().log_softmax(dim=-1)
            chosen = token_ids[0, len(prompt.token_ids) :].unsqueeze(-1)
            results.append(log_probs.gather(1, chosen).squeeze(-1).tolist())
        return results

    def _admit(self, num_free: int) -> list[Response]:
        """Prefill a wave of waiting rows, sample their first tokens and add them to the batch."""
        rows, prompts = self._next_wave(num_free)
        numbers = torch.tensor([prompts[_tokens_so_far(row)] for row in rows], device=self._device)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._device)
        longest = max(len(prompt) for prompt in prompts)
        padded = [[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        positions = torch.arange(longest, device=self._device) - (longest - lengths).unsqueeze(-1)
        cache: Any = Cache(layer_class_to_replicate=_GrowingLayer)
        self._experts.clear()
        logits = self._model(
            input_ids=torch.tensor(padded, device=self._device),
            attention_mask=(positions >= 0).long(),
            position_ids=positions.clamp(min=0),
            past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]
        for layer in cache.layers:
            layer.select(numbers)
        if self._experts:
            routing = self._routing()  # [prompts x longest, layers, K]
            routing = routing.reshape(len(prompts), longest, *routing.shape[1:])
            for row, number in zip(rows, numbers.tolist(), strict=True):
                assert row.routing is not None
                row.routing.put(0, routing[number, longest - int(lengths[number]) :])
        prompt_lengths = [len(row.request.prompt.token_ids) for row in rows]
        samplings = [self._sampling_number(row) for row in rows]
        wave = _Batch(
            rows=list(rows),
            cache=cache,
            ids=torch.zeros_like(numbers),
            positions=lengths[numbers],
            prompt_lengths=torch.tensor(prompt_lengths, device=self._device),
            uniforms=torch.stack([self._uniforms(row.request) for row in rows]).to(self._device),
            sampling_numbers=torch.tensor(samplings, device=self._device),
        )
        finished = self._sample(wave, logits[numbers])
        if self._batch is None:
            self._batch = wave
        else:
            self._batch.compact()
            self._batch.join(wave)
        self._shrink()
        return finished

    def _next_wave(self, num_free: int) -> tuple[list[Row], dict[tuple[int, ...], int]]:
        """Take the rows of one prefill; returns them and their distinct, numbered prompts.

        The prompt of a resumed response includes its existing tokens.
        """
        rows: list[Row] = []
        prompts: dict[tuple[int, ...], int] = {}
        longest = 0
        while self._waiting and len(rows) < num_free:
            prompt = _tokens_so_far(self._waiting[0])
            longest = max(longest, len(prompt))
            if prompts and prompt not in prompts and (len(prompts) + 1) * longest > PREFILL_TOKENS:
                break
            prompts.setdefault(prompt, len(prompts))
            rows.append(self._waiting.popleft())
        return rows, prompts

    def _decode(self, batch: _Batch) -> list[Response]:
        """Decode one token of every row; returns finished responses."""
        num_columns = batch.cache.get_seq_length() + 1
        columns = torch.arange(num_columns, device=self._device)
        self._experts.clear()
        logits = self._model(
            input_ids=batch.ids.unsqueeze(-1),
            attention_mask=(columns >= (num_columns - 1 - batch.positions).unsqueeze(-1)).long(),
            position_ids=batch.positions.unsqueeze(-1),
            past_key_values=batch.cache,
        ).logits[:, -1]
        if self._experts:
            routing, positions = self._routing(), batch.positions.tolist()
            for number, row in enumerate(batch.rows):
                if row is not None and row.routing is not None:
                    row.routing.put(positions[number], routing[number : number + 1])
        is_live = [row is not None for row in batch.rows]
        batch.positions = batch.positions + torch.tensor(is_live).to(self._device)
        finished = self._sample(batch, logits)
        self._shrink()
        return finished

    def _routing(self) -> Experts:
        """Return the experts of the last pass, [n, layers, K]."""
        return torch.stack(self._experts, dim=1).to(torch.uint8).cpu().numpy()

    def _sample(self, batch: _Batch, logits: torch.Tensor) -> list[Response]:
        """Sample each row's next token; returns finished responses."""
        last = self.settings.max_response_tokens - 1
        numbers = (batch.positions - batch.prompt_lengths).clamp(max=last)
        chances = batch.uniforms.gather(1, numbers.unsqueeze(-1)).squeeze(-1)
        samplings = batch.sampling_numbers, self._samplings
        batch.ids, log_probs = _sample_tokens(logits, chances, *samplings)
        finished = []
        sampled = zip(batch.rows, batch.ids.tolist(), log_probs.tolist(), strict=True)
        for index, (row, token, log_prob) in enumerate(list(sampled)):
            if row is None:
                continue
            row.response_ids.append(token)
            row.rollout_log_probs.append(log_prob)
            reason: FinishReason = "stop" if token in self._stop_ids else "length"
            if reason == "stop" or len(row.response_ids) == self.settings.max_response_tokens:
                finished.append(self._rows.pop(row.request.request_id).response(reason))
                batch.rows[index] = None
        return finished

    def _shrink(self) -> None:
        """Compact the batch if enough rows have finished; drop it if all have."""
        if self._batch is None:
            return
        num_live = self._batch.num_live()
        if num_live == 0:
            self._batch = None
        elif num_live <= (1 - FINISHED_SHARE) * len(self._batch.rows):
            self._batch.compact()

    def _sampling_number(self, row: Row) -> int:
        sampling = row.request.sampling or self.settings.sampling
        if sampling not in self._samplings:
            self._samplings.append(sampling)
        return self._samplings.index(sampling)

    def _uniforms(self, request: GenerationRequest) -> torch.Tensor:
        generator = torch.Generator().manual_seed(request.seed)
        size = self.settings.max_response_tokens
        return torch.rand(size, dtype=torch.float64, generator=generator)

    def _rows_that_fit(self) -> int:
        """Return how many full-length sequences fit into the cache; raises RolloutError if none."""
        config = self._model.config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        width = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
        token_bytes = 2 * config.num_hidden_layers * width * self._model.dtype.itemsize
        available, key = self.settings.memory_bytes, "rollout.memory_gigabytes"
        if self._device.type != "cpu":
            free, total = getattr(torch, self._device.type).mem_get_info(self._device)
            available = int(free - (1 - self.settings.memory_utilization) * total)
            key = "rollout.memory_utilization"
        row_bytes = token_bytes * self.settings.max_model_tokens
        if available < row_bytes:
            raise RolloutError(
                f"one sequence of {self.settings.max_model_tokens} tokens needs {row_bytes} bytes "
                f"of cache, but only {available} are free; raise {key} or lower "
                "rollout.max_response_tokens"
            )
        return available // row_bytes


def _sample_tokens(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    numbers: torch.Tensor,
    samplings: Sequence[Sampling],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample from `logits` [N, V]; returns token ids [N] and their log-probs [N].

    Inverts the CDF at `uniforms` [N], float64 in [0, 1). `numbers` [N] selects each row's sampling.
    A greedy row gets the most likely token and its log-prob at temperature 1.
    """
    logits = logits.float()
    present = numbers.unique().tolist()
    if len(present) == 1:
        return _sample_rows(logits, uniforms, samplings[present[0]])
    ids, log_probs = torch.empty_like(numbers), torch.empty_like(logits[:, 0])
    for number in present:
        rows = numbers == number
        ids[rows], log_probs[rows] = _sample_rows(logits[rows], uniforms[rows], samplings[number])
    return ids, log_probs


def _sample_rows(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    if sampling.is_greedy:
        log_probs = logits.log_softmax(dim=-1)
        ids = logits.argmax(dim=-1)
    else:
        logits = _filter_logits(logits / sampling.temperature, sampling.top_k, sampling.top_p)
        log_probs = logits.log_softmax(dim=-1)
        cumulative = log_probs.double().exp().cumsum(dim=-1)
        # Rounding must not raise the target to the total, which is outside every token's interval.
        targets = uniforms * cumulative[:, -1] * (1 - 2**-52)
        ids = torch.searchsorted(cumulative, targets.unsqueeze(-1), right=True).squeeze(-1)
    return ids, log_probs.gather(1, ids.unsqueeze(-1)).squeeze(-1)


def _filter_logits(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Set logits to -inf outside the `top_k` most likely tokens, then outside `top_p` of mass."""
    if 0 < top_k < logits.shape[-1]:
        lowest = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < lowest, -torch.inf)
    if top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        is_beyond = probs.cumsum(dim=-1) - probs >= top_p
        logits = logits.masked_fill(is_beyond.scatter(1, order, is_beyond), -torch.inf)
    return logits


def _tokens_so_far(row: Row) -> tuple[int, ...]:
    return (*row.request.prompt.token_ids, *row.response_ids)


def _stack(*parts: torch.Tensor) -> torch.Tensor:
    """Concatenate tensors [N, heads, L, D] along N; shorter ones are padded at the front."""
    length = max(part.shape[-2] for part in parts)
    return torch.cat([functional.pad(part, (0, 0, length - part.shape[-2], 0)) for part in parts])
