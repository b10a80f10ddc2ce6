"""The algorithm: batches, advantages, losses, KL and corrections."""
