"""Hides vLLM's warnings about what engines and servers set on purpose, and no others."""

from __future__ import annotations

import logging

# By logger: the first words of each warning.
EXPECTED_WARNINGS = {
    "vllm.engine.arg_utils": (
        # a chunked prompt with a seed crashes vLLM 0.32's CPU worker
        "This model does not officially support disabling chunked prefill",
        # requests have their own seeds, or the seed is as intended
        "The global random seed is set to",
    ),
    # engines on a CPU, and serve.eager
    "vllm.config.vllm": ("Enforce eager set", "Inductor compilation was disabled by user settings"),
    # on a CPU, for each request with a picture
    "vllm.v1.worker.cpu_worker": ("CPU backend doesn't allow to use `torch.set_num_threads`",),
    # prompts are token ids, which need no renderer
    "vllm.v1.engine.input_processor": ("Passing raw prompts to InputProcessor is deprecated",),
}


def hide_expected_warnings() -> None:
    """Hide them in this process; call this before an engine starts."""
    for name in EXPECTED_WARNINGS:
        logging.getLogger(name).addFilter(_is_unexpected)


def _is_unexpected(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(EXPECTED_WARNINGS[record.name])
