"""The operations that rewritten graphs call (`plan_step`, `plan_mask`, `cache_write`, `cache_write_kv`, `attention`,
`gather`, `single_row_linear`, `arrived`), and those between graphs (`copy_blocks`, `execute_copies`).

They are plain functions, so that a compiler traces through them. On the CPU they are torch formulas that Inductor
fuses into loops which read pages in place (`formulas`, `decode`); elsewhere they are the custom operators
`torch.ops.paged_inductor.*` (`library`), which launch the Triton kernels.
"""

from .arrival import arrived, arriving
from .decode import INDUCTOR_OPTIONS
from .dispatch import attention, cache_write, cache_write_kv, copy_blocks, execute_copies, gather
from .library import uses_kernels
from .linear import single_row_linear
from .plan import MaskPlan, StepPlan, plan_mask, plan_static, plan_step, plan_window

__all__ = [
    "INDUCTOR_OPTIONS",
    "MaskPlan",
    "StepPlan",
    "arrived",
    "arriving",
    "attention",
    "cache_write",
    "cache_write_kv",
    "copy_blocks",
    "execute_copies",
    "gather",
    "plan_mask",
    "plan_static",
    "plan_step",
    "plan_window",
    "single_row_linear",
    "uses_kernels",
]
