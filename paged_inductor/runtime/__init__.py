"""The runtime: which physical block holds which token, who owns it, and how much memory that takes.

`pool` (ids and reference counts) <- `table` (rows and views of blocks) <- `group` (arenas behind the ids)
<- `manager` (all groups of the process: budget, locks, statistics) <- `schedule` (tables as tensors for kernels).
"""

from .group import CacheGroup, SiteSpec, View
from .manager import Manager, StepViews, manager
from .schedule import Schedule
from .table import Row

__all__ = ["CacheGroup", "Manager", "Row", "Schedule", "SiteSpec", "StepViews", "View", "manager"]
