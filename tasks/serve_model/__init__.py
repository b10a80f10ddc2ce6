"""Real `vllm serve` processes as a context: one or several, checked before, healthy within, gone after."""
