"""Reads an answer out of a text and decides whether it is right. Used by rewards and evaluation alike."""
