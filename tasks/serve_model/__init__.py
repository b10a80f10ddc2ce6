"""Real `vllm serve` processes as a context: one or several, checked before, healthy within, gone after."""

from tasks.serve_model.command import API_KEY_VARIABLE, SERVED_NAME, free_ports
from tasks.serve_model.servers import Server, serve_model, serve_until_interrupted

__all__ = [
    "API_KEY_VARIABLE",
    "SERVED_NAME",
    "Server",
    "free_ports",
    "serve_model",
    "serve_until_interrupted",
]
