"""Evaluation over an OpenAI-compatible URL: no torch, no Ray, no vLLM, and nothing of this project."""
