"""Checks of a recipe before any stage runs: all findings at once, with the keys to change."""
