"""Registered problem sets, for training and evaluation alike."""
