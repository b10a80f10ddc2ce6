"""How a stage runs: as a Prefect task with retries, as a child process, and in the Prefect UI."""
