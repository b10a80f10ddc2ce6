"""Merges the shards of a trained model into a verified Hugging Face folder, with bounded memory."""
