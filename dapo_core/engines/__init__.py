"""Inference engines behind one interface: vLLM on accelerators and CPUs, Hugging Face everywhere."""
