"""Backoff: prompts without signal in several epochs are drawn less often."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_WAIT = 8  # epochs between two visits


@dataclass
class Backoff:
    """Decides in which epochs a prompt is drawn, by what its earlier visits gave.

    After n visits in a row without signal (all responses right, or all wrong), the next visit is
    2 ** (n - 1) epochs later, at most MAX_WAIT: after 1, 2, 4 and then every 8 epochs. A visit with
    signal starts over. Prompts are identified by Prompt.index.
    """

    # prompt -> [consecutive visits without signal, epoch of the last visit]; others are drawn in
    # every epoch
    visits: dict[int, list[int]] = field(default_factory=dict)

    def skips(self, prompt: int, epoch: int) -> bool:
        """Whether the prompt is passed over in this epoch."""
        num_without_signal, last = self.visits.get(prompt, (0, epoch))
        return num_without_signal > 0 and epoch - last < min(
            2 ** (num_without_signal - 1), MAX_WAIT
        )

    def visit(self, prompt: int, epoch: int) -> None:
        """Record that the prompt is drawn."""
        num_without_signal, _ = self.visits.get(prompt, (0, 0))
        self.visits[prompt] = [num_without_signal, epoch]

    def record(self, prompt: int, has_signal: bool) -> None:
        """Record what the prompt's visit gave."""
        if has_signal:
            self.visits.pop(prompt, None)
        elif prompt in self.visits:
            self.visits[prompt][0] += 1
