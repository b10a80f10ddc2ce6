"""The registry of problem sets, one file each, for training and evaluation alike."""
