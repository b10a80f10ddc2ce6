"""Shards of a trained model become a Hugging Face folder: streamed, and verified by reading it back."""
