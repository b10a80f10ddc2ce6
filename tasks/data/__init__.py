"""Preparation of a recipe's data: training and held-out files, contamination, the data card."""
