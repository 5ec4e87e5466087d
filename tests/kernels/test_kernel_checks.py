"""Wrong inputs: a message says the value got, the values allowed and the next step, in wrapper and twin."""

from typing import Any

import pytest
import torch

from paged_cases import build
from paged_inductor import kernels
from paged_inductor.kernels import KernelInputError, KernelTypeError, checks, reference

VALID = build([12, 5])
NEW = torch.zeros(2, 2, 3, 16)
CODES = torch.zeros(7, 2, 8, 16, dtype=torch.int8)
SCALES = torch.ones(7, 2, 8)
QUANTIZED = {"k_arena": CODES, "v_arena": CODES, "k_scales": SCALES, "v_scales": SCALES}


def attention_arguments(**changes: Any) -> dict[str, Any]:
    k_arena, v_arena, block_table, seq_lens, kv_len = VALID.pages
    arguments: dict[str, Any] = {
        "q": VALID.queries(2, 1),
        "k_arena": k_arena,
        "v_arena": v_arena,
        "block_table": block_table,
        "seq_lens": seq_lens,
        "kv_len": kv_len,
        "scale": 1.0,
    }
    return arguments | changes


BAD_ATTENTION = [
    ({"q": None}, KernelTypeError, "q is a NoneType; pass a torch.Tensor"),
    ({"q": torch.zeros(2, 4, 16)}, KernelInputError, "q has shape (2, 4, 16) (3 dims); pass 4 dims"),
    ({"q": torch.zeros(2, 4, 1, 16).half()}, KernelTypeError, "allowed: torch.float32; convert"),
    ({"q": torch.zeros(2, 3, 1, 16)}, KernelInputError, "q has 3 heads, the arenas have 2; allowed:"),
    ({"q": torch.zeros(2, 4, 1, 8)}, KernelInputError, "q has head dim 8, k_arena has 16"),
    ({"q": torch.zeros(3, 4, 1, 16)}, KernelInputError, "q has batch size 3, block_table has 2"),
    ({"k_arena": torch.zeros(4, 2, 12, 16)}, KernelInputError, "block_size 12"),
    ({"k_arena": torch.zeros(4, 2, 8, 640)}, KernelInputError, "head dim 640"),
    ({"v_arena": torch.zeros(4, 2, 8, 16)}, KernelInputError, "v_arena has shape[:3] (4, 2, 8)"),
    ({"block_table": VALID.block_table.long()}, KernelTypeError, "block_table has dtype torch.int64"),
    ({"seq_lens": VALID.seq_lens[:1]}, KernelInputError, "seq_lens has batch size 1, block_table has 2"),
    ({"seq_lens": VALID.seq_lens.repeat(2)[::2]}, KernelInputError, "seq_lens has stride 2"),
    ({"kv_len": 17}, KernelInputError, "kv_len is 17; allowed: 1 to 16"),
    ({"kv_len": 0}, KernelInputError, "kv_len is 0; allowed: 1 to 16"),
    ({"kv_len": torch.tensor(3)}, KernelTypeError, "kv_len is a Tensor; pass an int"),
    ({"scale": "1"}, KernelTypeError, "scale is a str; pass a float"),
    ({"window": 4}, KernelInputError, "window is 4 but causal_offset is None"),
    ({"window": 0, "causal_offset": 11}, KernelInputError, "window is 0; allowed: 1 to"),
    ({"causal_offset": 2**31}, KernelInputError, "causal_offset is 2147483648"),
    ({"mask": torch.ones(2, 4, 1, 12).int()}, KernelTypeError, "mask has dtype torch.int32"),
    ({"mask": torch.ones(2, 4, 1, 11)}, KernelInputError, "allowed: (2, 4, 1, 12) where any dim may be 1"),
    ({"softcap": 0.0}, KernelInputError, "softcap is 0.0; allowed: finite and above 0"),
    ({"softcap": "50"}, KernelTypeError, "softcap is a str; pass a float"),
    ({"sinks": torch.ones(3)}, KernelInputError, "sinks has head count 3, q has 4"),
    ({"sinks": torch.ones(8)[::2]}, KernelInputError, "sinks has stride 2"),
    ({"chunk": 4}, KernelInputError, "chunk is 4 but causal_offset is None"),
    ({"chunk": 0, "causal_offset": 11}, KernelInputError, "chunk is 0; allowed: 1 to"),
    ({"slopes": torch.ones(3)}, KernelInputError, "slopes has head count 3, q has 4"),
    ({"slopes": torch.ones(4).int()}, KernelTypeError, "slopes has dtype torch.int32"),
    ({"row_start": 2**31}, KernelInputError, "row_start is 2147483648; allowed: -"),
    ({"row_start": 0, "kv_len": 0}, KernelInputError, "kv_len is 0; allowed: 1 to"),
    ({"hidden": torch.zeros(3, dtype=torch.int32)}, KernelInputError, "hidden has batch size 3, seq_lens has 2"),
    ({"hidden": torch.zeros(2)}, KernelTypeError, "hidden has dtype torch.float32"),
    ({"shared_prefix": 12}, KernelInputError, "shared_prefix is 12; allowed: multiples of the block size 8"),
    ({"shared_prefix": 24}, KernelInputError, "shared_prefix is 24; allowed: 0 to 16"),
    ({"k_scales": torch.ones(7, 2, 8)}, KernelInputError, "k_scales are given for an arena of torch.float32"),
    ({**QUANTIZED, "k_scales": None}, KernelInputError, "k_scales is None for an arena of torch.int8"),
    ({**QUANTIZED, "v_scales": torch.ones(7, 2, 4)}, KernelInputError, "v_scales has shape (7, 2, 4), its arena has"),
    ({**QUANTIZED, "v_scales": torch.ones(7, 2, 8).half()}, KernelTypeError, "allowed: torch.float32; convert"),
    ({"q": VALID.queries(2, 1).to("meta")}, KernelInputError, "q has device meta, k_arena has cpu"),
]


@pytest.mark.parametrize("attention", [kernels.attention, reference.attention], ids=["triton", "twin"])
@pytest.mark.parametrize(("changes", "error", "message"), BAD_ATTENTION, ids=[bad[2] for bad in BAD_ATTENTION])
def test_attention_explains(attention: Any, changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        attention(**attention_arguments(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("module", [kernels, reference], ids=["triton", "twin"])
def test_page_operations_explain(module: Any) -> None:
    arena, table, lens = VALID.k_arena, VALID.block_table, VALID.seq_lens
    with pytest.raises(KernelInputError, match="new has H_kv 1, the arena has 2"):
        module.cache_write(arena, NEW[:, :1], table, lens)
    with pytest.raises(KernelInputError, match="v_new has token count 2, k_new has 3"):
        module.cache_write_kv(arena, VALID.v_arena, NEW, NEW[:, :, :2], table, lens)
    with pytest.raises(KernelTypeError, match=r"new has dtype torch\.float16"):
        module.cache_write(arena, NEW.half(), table, lens)
    with pytest.raises(KernelInputError, match="dst_ids has length 1, src_ids has 2"):
        module.copy_blocks(arena, torch.tensor([1, 2]), torch.tensor([3]))
    with pytest.raises(KernelTypeError, match=r"src_ids has dtype torch\.float32"):
        module.copy_blocks(arena, torch.ones(1), torch.tensor([3]))
    with pytest.raises(KernelTypeError, match="arenas is a list; pass a torch.Tensor, or a sequence"):
        module.copy_blocks([arena, None], torch.tensor([1]), torch.tensor([3]))
    with pytest.raises(KernelInputError, match=r"arenas\[1\] has shape .* allowed: blocks that lie densely"):
        module.copy_blocks([arena, arena[..., :8]], torch.tensor([1]), torch.tensor([3]))
    with pytest.raises(KernelInputError, match=r"arenas\[0\] has device cpu, src_ids has meta"):
        module.copy_blocks(arena, *torch.ones(2, 1, device="meta").long())
    with pytest.raises(KernelInputError, match="kv_len is 99; allowed: 0 to 16"):
        module.gather(arena, table, lens, 99)
    with pytest.raises(KernelTypeError, match=r"dtype is torch\.float16; allowed: torch\.float32"):
        module.gather(arena, table, lens, 12, dtype=torch.float16)
    with pytest.raises(KernelInputError, match=r"scales is None for an arena of torch\.int8"):
        module.cache_write(CODES, NEW, table, lens)
    with pytest.raises(KernelTypeError, match=r"new has dtype torch\.int8"):
        module.cache_write(CODES, NEW.to(torch.int8), table, lens, scales=SCALES)


def test_a_device_that_triton_cannot_run_on_is_named() -> None:
    with pytest.raises(KernelInputError, match=r"on cpu; allowed: a CUDA or ROCm .* TRITON_INTERPRET=1"):
        checks.launchable(NEW, interpreted=False)


def test_a_device_that_cannot_convert_float8_is_named() -> None:
    checks.float8((8, 9))
    with pytest.raises(KernelTypeError, match=r"capability 8\.0; allowed: 8\.9 or later; store torch\.int8"):
        checks.float8((8, 0))
