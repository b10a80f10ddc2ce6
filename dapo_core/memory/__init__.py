"""The memory that a training takes, from its configuration and the model's config.json alone."""
