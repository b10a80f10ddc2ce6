"""Read bash scripts that start a training, without executing anything."""
