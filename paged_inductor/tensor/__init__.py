"""PagedTensor and what eager operations mean on it.

`handle` (the class and the table of meanings) <- `derive` (new views: forks, crops, selections, merges)
<- `structure` (operations on shapes, rows and lengths), `materialize` (dense copies), `inplace` (writes),
`attend` (SDPA), `append` (cat), `adopt` (dense buffers become handles). `verified`: handles that carry a dense tensor
to check against.
"""

from . import adopt, append, attend, inplace, materialize, structure
from .handle import PagedTensor

__all__ = ["PagedTensor", "adopt", "append", "attend", "inplace", "materialize", "structure"]
