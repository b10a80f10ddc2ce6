"""Asks a served model, grades its answers, and records them as they arrive."""
