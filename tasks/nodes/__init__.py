"""Machines that a training runs on: their list, the Ray on them, and what it needs there."""
