"""Extracts answers from responses and grades them. Shared by training rewards and evaluation."""
