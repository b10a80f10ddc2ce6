"""The default recipe's dataset and model, made on this machine."""
