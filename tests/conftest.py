"""One thread for torch, and hypothesis profiles.

`make test` tries 15 cases a property, `make test-long` a thousand.
"""

import os

# Before torch is loaded, here and in what tests start. Tests run side by side, on tensors of a few
# elements: with more threads they spend most of their time waiting for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("default", deadline=None, max_examples=15, suppress_health_check=_QUIET)
settings.register_profile("long", deadline=None, max_examples=1000, suppress_health_check=_QUIET)
settings.load_profile("default")
