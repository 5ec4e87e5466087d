"""Settings of all tests. The interpreter must be chosen before triton is first imported."""

import gc
import itertools
import os
import sys

# `pytest -m gpu` compiles the kernels, all else interprets them. Other conftest files import triton, so that pytest's
# own hooks would come too late.
if ("-m", "gpu") not in itertools.pairwise(sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import HealthCheck, settings

_common = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
    "report_multiple_bugs": False,
}
settings.register_profile("ci", max_examples=25, stateful_step_count=40, **_common)
settings.register_profile("fuzz", max_examples=4000, stateful_step_count=60, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_finish() -> None:
    """What was imported is left out of all garbage collections from here on, of which tests ask for many."""
    gc.collect()
    gc.freeze()
