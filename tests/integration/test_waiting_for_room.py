"""A training that waits for room in Ray ends within seconds on a signal, and has said what it waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAIT = """
import logging, sys
from dapo_core.cluster import placement
from dapo_core.cluster.connection import connected_to_ray
from dapo_core.config.train import TrainConfig
from dapo_core.stopping import StopRequest

logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
placement.WORD_SECONDS = 0.5
with StopRequest(), connected_to_ray(TrainConfig(ray_address=sys.argv[1]), num_cpus=0):
    placement.reserve(placement.Demand(2, {"CPU": 1000}), [])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_training_that_waits_for_room(ray_address: str, number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", WAIT, ray_address]
    one = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert one.stdout is not None
        said = next(line for line in one.stdout if "room in Ray" in line)
        assert "for 2 workers of {'CPU': 1000}: it has {" in said
        one.send_signal(number)
        one.communicate(timeout=300)
        assert one.returncode != 0
    finally:
        one.kill()
        one.wait()
