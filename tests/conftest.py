"""Settings that hold for every test."""

from __future__ import annotations

import os
import signal

from flows.prefect_settings import project_settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads cost more than they give
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # where more run than there are cores, spinning threads starve
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ |= project_settings()  # before Prefect is imported
# A shell that starts us in the background has us ignore these, and our children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
