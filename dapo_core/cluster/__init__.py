"""Policy ranks and rollout workers as Ray actors. No other package imports Ray."""
