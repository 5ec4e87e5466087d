"""PagedTensor and what eager operations mean on it.

`base` (what all handles share) <- `handle` (the class and the table of meanings)
<- `derive` (new views: forks, crops, selections, merges)
<- `structure` (operations on shapes, rows and lengths), `materialize` (dense copies), `inplace` (writes),
`attend` (SDPA), `append` (cat), `adopt` (dense buffers become handles).
`stacked`: several handles as one tensor. `verified`: handles that carry a dense tensor to check against.
"""

from . import adopt, append, attend, inplace, materialize, structure
from .base import Handle
from .handle import PagedTensor
from .stacked import PagedStack

__all__ = ["Handle", "PagedStack", "PagedTensor", "adopt", "append", "attend", "inplace", "materialize", "structure"]
