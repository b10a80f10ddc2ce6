"""Runs `vllm serve` processes for the length of a block."""
