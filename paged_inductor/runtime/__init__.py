"""The runtime: which physical block holds which token, who owns it, and how much memory that takes.

`pool` (ids and reference counts) <- `table` (rows of blocks) <- `policy` (who shares), `tails` (what of a dropped row
is kept) <- `group` (arenas behind the ids, and views of rows) <- `schedule` (a view's tables as tensors for kernels),
`tiers` and `disk` (memory below the arenas) <- `storage` (what is where) <- `arrival` (blocks on their way back) <-
`swap` (blocks that go and come back), `line` and `waiters` (who waits for memory) <- `budget` (who gets blocks, and at
whose expense), `unshare` (what in-place writes must copy first) <- `ledger` (all groups of the process, and the lock)
<- `views` (their making) <- `streams` (steps that begin before all is back) <- `manager` (steps, books) <- `lending`
(rows of equal tokens; `prefixes` names their blocks, `search` finds those of a prompt).
Beside them: `transfer` (copies under way), `ahead` (what will be used next), `census`, `counters` and `latency` (what
`stats()` says), `sanitizer` (debug mode), `order` (streams of a device), `numa` (hosts with several memory nodes),
`insist` (what Ctrl-C must not stop).
"""

from .group import CacheGroup
from .latency import Steps
from .lending import Lent, lend, settle
from .manager import Manager, StepViews, manager
from .names import RowNames, matter_within
from .policy import Policy
from .schedule import Schedule
from .search import Tokens
from .shared_prefix import few_lengths
from .site import SiteSpec
from .table import Row
from .view import View
from .waiters import Preempted

__all__ = [
    "CacheGroup",
    "Lent",
    "Manager",
    "Policy",
    "Preempted",
    "Row",
    "RowNames",
    "Schedule",
    "SiteSpec",
    "StepViews",
    "Steps",
    "Tokens",
    "View",
    "few_lengths",
    "lend",
    "manager",
    "matter_within",
    "settle",
]
