"""Render the command line, environment and files that start another trainer."""
