"""Inference engines with one interface: vLLM for accelerators and CPU, Hugging Face everywhere."""
