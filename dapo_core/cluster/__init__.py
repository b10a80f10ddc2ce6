"""Policy ranks and rollout workers as Ray actors. Nothing else imports Ray."""
