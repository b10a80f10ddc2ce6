"""A training that waits for Ray resources logs what it waits for, and a signal ends it within
seconds.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAIT = """
import logging, sys
from dapo_core.cluster import placement
from dapo_core.cluster.connection import connected_to_ray
from dapo_core.config.train import TrainConfig
from dapo_core.machine.stopping import StopRequest

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
placement.LOG_SECONDS = 0.5
with StopRequest(), connected_to_ray(TrainConfig(ray_address=sys.argv[1]), num_cpus=0):
    placement.reserve(placement.Demand(2, {"CPU": 1000}), [])
"""


def test_a_signal_ends_a_training_that_waits_for_resources(ray_address: str) -> None:
    """test_stopping.py shows that SIGINT does what SIGTERM does."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", WAIT, ray_address]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "Ray resources" in line)
        assert "for 2 workers of {'CPU': 1000} (" in line
        assert "so far): total {" in line
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
        assert process.returncode != 0
    finally:
        process.kill()
        process.wait()
