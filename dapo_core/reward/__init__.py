"""Rewards: a scorer per data source, run under a time limit, plus overlong shaping."""
