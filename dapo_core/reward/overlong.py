"""What a response loses for coming close to the length limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dapo_core.config.training import OverlongConfig


def overlong_penalty(
    num_tokens: int, max_response_tokens: int, overlong: OverlongConfig, is_clamped: bool = True
) -> float:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13): from 0 down to -penalty_factor.

    0 up to max_response_tokens - buffer_tokens, then linear, -penalty_factor at the limit. A response beyond
    the limit gets no less than that, unless `is_clamped` is False: then the line goes on, as in verl.
    """
    if not overlong.enabled:
        return 0.0
    excess = max(num_tokens - (max_response_tokens - overlong.buffer_tokens), 0) / overlong.buffer_tokens
    return -overlong.penalty_factor * (min(excess, 1.0) if is_clamped else excess)
