"""Render the start of a cluster as files, for sites with their own launcher: scripts, SLURM,
KubeRay.
"""
