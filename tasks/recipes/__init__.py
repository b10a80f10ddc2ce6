"""Recipe files: a first one from `dapo init`, and conversions of other trainers' configurations."""
