"""Prefect flows and the `dapo` command line."""
