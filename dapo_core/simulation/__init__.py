"""What a training step would take: the sampler on simulated engines."""
