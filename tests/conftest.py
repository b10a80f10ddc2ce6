"""Settings that hold for every test."""

from __future__ import annotations

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads cost more than they give
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A shell that starts us in the background has us ignore these, and our children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
