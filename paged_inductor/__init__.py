"""paged_inductor: virtual memory for KV caches, as a torch.compile backend."""

from torch._dynamo import list_backends, register_backend, trace_rules

from . import testing
from ._config import Config, configure
from ._errors import (
    ConfigurationError,
    IntegrityError,
    KVBudgetExceeded,
    MaterializationError,
    MissingExtraError,
    PagedInductorError,
    PatchError,
    PoolMismatchError,
    PrefixError,
    QuotaExceeded,
    SanitizerError,
    SavedCacheError,
    SwapError,
    UnsupportedInputError,
    VerificationError,
)
from .backend import paged_inductor as _backend
from .explain import Explanation, explain
from .leaks import Leak, check_leaks
from .metrics import MetricsCollector, MetricsServer, serve_metrics
from .monitor import Stats, StepLatency, TenantStats, check_integrity, reset, stats, trim
from .patch import page, unpage
from .persist import load, save
from .prefetch import prefetch
from .prefixes import forget_prefixes, register_prefix
from .tenancy import tenant
from .tensor import PagedStack, PagedTensor
from .timeline import Timeline, timeline

for _part in ("runtime", "tensor", "ops"):  # finalizers and handles' operations also run inside compiled functions
    trace_rules.add(f"{__name__}.{_part}")  # which must not trace them
if "paged_inductor" not in list_backends(exclude_tags=None):  # a bare checkout has no entry point
    register_backend(_backend, name="paged_inductor")

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigurationError",
    "Explanation",
    "IntegrityError",
    "KVBudgetExceeded",
    "Leak",
    "MaterializationError",
    "MetricsCollector",
    "MetricsServer",
    "MissingExtraError",
    "PagedInductorError",
    "PagedStack",
    "PagedTensor",
    "PatchError",
    "PoolMismatchError",
    "PrefixError",
    "QuotaExceeded",
    "SanitizerError",
    "SavedCacheError",
    "Stats",
    "StepLatency",
    "SwapError",
    "TenantStats",
    "Timeline",
    "UnsupportedInputError",
    "VerificationError",
    "check_integrity",
    "check_leaks",
    "configure",
    "explain",
    "forget_prefixes",
    "load",
    "page",
    "prefetch",
    "register_prefix",
    "reset",
    "save",
    "serve_metrics",
    "stats",
    "tenant",
    "testing",
    "timeline",
    "trim",
    "unpage",
]
