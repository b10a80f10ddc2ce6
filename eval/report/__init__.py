"""Compares evaluations and writes reports, plots and pages."""
