"""Settings of all tests. The interpreter must be chosen before triton is first imported."""

import gc
import itertools
import os
import sys
from collections.abc import Iterator
from unittest import mock

# `pytest -m gpu` compiles the kernels, all else interprets them. Other conftest files import triton, so that pytest's
# own hooks would come too late.
if ("-m", "gpu") not in itertools.pairwise(sys.argv):
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
from hypothesis import HealthCheck, settings

from tests.kernel_sanitizer import KernelSanitizer

_common = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": True,
    "report_multiple_bugs": False,
}
settings.register_profile("ci", max_examples=25, stateful_step_count=40, **_common)
settings.register_profile("fuzz", max_examples=4000, stateful_step_count=60, **_common)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(autouse=True, scope="module")
def thawed() -> None:
    """Other modules' compiled code is dropped. What was imported, or outlives it, is left out of garbage collections,
    of which tests ask for many."""
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.fixture
def eager_formula() -> Iterator[None]:
    """Decode on the CPU by the torch formula, not by what Inductor makes of it: seconds for each kind of arguments.

    tests/ops compares the formula and the compiled code with references; tests/models/test_smollm2.py and the modules
    that override `formula` use the compiled one end to end.
    """
    from paged_inductor.ops.decode import decode_formula

    with mock.patch(
        "paged_inductor.ops.decode._formula", lambda kind, tensors, constants: decode_formula(*tensors, *constants)
    ):
        yield


@pytest.fixture(autouse=True)
def checked_kernels(kernel_sanitizer: KernelSanitizer) -> Iterator[None]:
    """No interpreted kernel of a test may do what would go wrong on a GPU, not even where the error is caught."""
    kernel_sanitizer.hazards.clear()
    yield
    assert not kernel_sanitizer.hazards


@pytest.fixture(scope="session")
def kernel_sanitizer() -> Iterator[KernelSanitizer]:
    """Watches every kernel that the interpreter runs; kernels that are compiled it does not see."""
    sanitizer = KernelSanitizer()
    with sanitizer.watch():
        yield sanitizer
