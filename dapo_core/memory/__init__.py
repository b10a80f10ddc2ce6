"""Plans a training's memory and time from its configuration and the model's config.json."""
