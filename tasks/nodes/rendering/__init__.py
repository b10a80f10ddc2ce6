"""A cluster's start as files, for sites that start things their own way: scripts, a SLURM job, KubeRay's YAML."""
