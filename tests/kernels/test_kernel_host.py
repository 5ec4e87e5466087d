"""No wrapper reads device memory: on meta tensors, which have none, every launch is planned all the same."""

import pytest
import torch
from torch import Tensor

from paged_inductor import kernels
from paged_inductor.kernels import checks
from paged_inductor.kernels.launch import Launch

BATCH, KV_HEADS, HEADS, DIM, BLOCK, WIDTH = 3, 2, 4, 16, 16, 64


def meta(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


PAGES = (meta(BATCH, WIDTH, dtype=torch.int32), meta(BATCH, dtype=torch.int32))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are launched, in place of launching them."""
    names: list[str] = []
    monkeypatch.setattr(Launch, "run", lambda self: names.append(self.kernel.__name__))
    monkeypatch.setattr(checks, "launchable", lambda *_: None)
    return names


@pytest.mark.parametrize(
    ("q_len", "deterministic", "want"),
    [
        (1, False, ["decode_kernel", "merge_kernel"]),
        (1, True, ["decode_kernel", "merge_in_order_kernel"]),
        (40, False, ["prefill_kernel"]),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_attention(q_len: int, deterministic: bool, want: list[str], masked: bool, launches: list[str]) -> None:
    mask = meta(1, 1, q_len, 1000, dtype=torch.bool) if masked else None
    arena = meta(99, KV_HEADS, BLOCK, DIM)
    q = meta(BATCH, HEADS, q_len, DIM)
    options = {"scale": 0.25, "causal_offset": 1000 - q_len, "window": 900, "mask": mask, "softcap": 30.0}
    out = kernels.attention(q, arena, arena, *PAGES, 1000, **options, sinks=meta(HEADS), deterministic=deterministic)
    assert out.shape == (BATCH, HEADS, q_len, DIM) and out.is_meta
    assert launches == want


def test_pages(launches: list[str]) -> None:
    arena, new = meta(99, KV_HEADS, BLOCK, DIM), meta(BATCH, KV_HEADS, 5, DIM)
    kernels.cache_write(arena, new, *PAGES)
    kernels.cache_write_kv(arena, arena, new, new, *PAGES)
    kernels.copy_blocks(arena, meta(4, dtype=torch.int64), meta(4, dtype=torch.int64))
    kernels.gather(arena, *PAGES, 1000)
    assert launches == ["cache_write_kernel", "cache_write_kernel", "copy_blocks_kernel", "gather_kernel"]
