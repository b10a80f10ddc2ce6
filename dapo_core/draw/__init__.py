"""Draws the groups of a step: prompts, rollouts, sampling order, and an account of every token."""
