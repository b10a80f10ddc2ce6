"""Data preparation: training and held-out files, contamination checks, the data card."""
