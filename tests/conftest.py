"""Settings that hold for every test."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads cost more than they give
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
