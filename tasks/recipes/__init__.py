"""Recipe files: a first one from `dapo init`, and conversions from and to other trainers."""
