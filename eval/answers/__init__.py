"""Finds the answer in a text and decides whether it is right. Shared by rewards and evaluation."""
