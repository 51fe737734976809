"""One thread per process: a fork after a multi-threaded forward hangs, and machines that run tests are small."""

import gc
import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if not Path("/dev/nvidiactl").exists():
    # Read when Triton is imported: without a GPU its kernels run in the interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from hypothesis import HealthCheck, settings

# Tests count operations, never seconds: machines may be loaded, and a slow draw is none that is wrong.
PATIENT = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same examples in every run: what fails fails again. `make campaigns` draws others.
settings.register_profile("motet", derandomize=True, database=None, max_examples=40, **PATIENT)
settings.register_profile("draws", max_examples=300, **PATIENT)
settings.load_profile("motet")

# What a forked process inherits is never collected in it: a store's server would wait there for a thread that is not.
os.register_at_fork(after_in_child=gc.freeze)
