"""The machine: devices, versions, environment variables, ports, digests and signals."""
