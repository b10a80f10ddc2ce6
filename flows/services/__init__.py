"""The Prefect server and worker of one machine: `dapo up`, `down`, `doctor`."""
