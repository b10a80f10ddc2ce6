"""Inference engines behind one interface: vLLM, and Hugging Face wherever torch runs."""
