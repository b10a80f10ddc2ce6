"""Shards of a trained model into a Hugging Face folder, streamed, and proven by reading it back."""

from dapo_core.merge.run import merge_checkpoint
from dapo_core.merge.writer import shard_name
from dapo_core.model_folder import MERGE_MANIFEST

__all__ = ["MERGE_MANIFEST", "merge_checkpoint", "shard_name"]
