"""What a handle is to the program that holds it: right numbers, old meaning kept, nothing copied, nothing leaked."""

from __future__ import annotations

import copy
import gc
import io
import linecache
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import paged_inductor.ops as ops
from paged_inductor import MaterializationError, PagedTensor, PoolMismatchError, UnsupportedInputError, configure
from paged_inductor._config import reset_config
from paged_inductor.runtime import manager
from paged_inductor.tensor.attend import FUSED
from paged_inductor.tensor.verified import promote

from .factory import paged_like, view_of
from .model import Boom, attention, broken


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    configure(on_materialize="silent")
    yield
    reset_config()
    manager().check_integrity()


@pytest.fixture
def dense() -> Tensor:
    return torch.randn(2, 3, 20, 4, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def no_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on reading tokens out of the pages fails."""

    def fail(*args: object) -> None:
        raise AssertionError("tokens were copied")

    monkeypatch.setattr(ops, "gather", fail)


def tail(count: int, batch: int = 2, seed: int = 1) -> Tensor:
    return torch.randn(batch, 3, count, 4, generator=torch.Generator().manual_seed(seed))


# -- reading -------------------------------------------------------------------------------------------------


def test_every_way_of_reading_gives_the_numbers(dense: Tensor) -> None:
    (handle,) = paged_like(dense)
    assert repr(dense) in repr(handle)
    assert "shape=[2, 3, 20, 4]" in str(handle)
    assert (handle.numpy() == dense.numpy()).all()
    assert handle.tolist() == dense.tolist()
    assert torch.equal(handle.mean(), dense.mean())
    assert handle[1, 2, 19, 3].item() == dense[1, 2, 19, 3].item()
    for index in [(0,), (slice(None), 1), (..., -1), (slice(None), slice(None), slice(3, 9)), (1, slice(0, 2), 5)]:
        assert torch.equal(handle[index] + 0, dense[index])
    assert torch.equal(torch.tensor(handle.tolist()), dense)
    assert torch.equal(handle.sum(dim=(0, 2)), dense.sum(dim=(0, 2)))
    assert bool((handle == dense).all())


@pytest.mark.parametrize("how", ["save", "pickle"])
def test_saved_as_dense(dense: Tensor, how: str) -> None:
    (handle,) = paged_like(dense)
    if how == "pickle":
        loaded = pickle.loads(pickle.dumps(handle))
    else:
        file = io.BytesIO()
        torch.save({"cache": handle}, file)
        file.seek(0)
        loaded = torch.load(file)["cache"]
    assert type(loaded) is Tensor
    assert torch.equal(loaded, dense)


@pytest.mark.parametrize("inference", [False, True])
def test_reshape_and_contiguous_copy_where_torch_copies(dense: Tensor, inference: bool) -> None:
    """What torch makes a copy does not see later writes; what it makes a view does."""
    with torch.inference_mode(inference):
        _check_copies(dense)


def _check_copies(dense: Tensor) -> None:
    (handle,) = paged_like(dense)
    dense = dense.clone()
    derived = [
        (lambda x: x.transpose(1, 2).contiguous(), True),
        (lambda x: x.transpose(1, 2).reshape(2, 20, 12), True),
        (lambda x: x[:, :, 3:7].contiguous(), True),
        (lambda x: x[:, :, 3:7].reshape(2, -1), True),
        (lambda x: x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(2, 6, 20, 4), True),
        (lambda x: x.unsqueeze(1).flatten(0, 1), False),
        (lambda x: x.reshape(2, 3, 80), False),
        (lambda x: x.transpose(1, 2)[:, 4:], False),
        (lambda x: x.transpose(1, 2).transpose(2, 3), False),
    ]
    results = [(function(handle), function(dense), copied) for function, copied in derived]
    for x in (handle, dense):
        x[:, :, 2:9] = 7.0
    for i, (paged, wanted, copied) in enumerate(results):
        assert bool((wanted == 7.0).any()) is not copied, i
        assert torch.equal(paged + 0, wanted), i


# -- materialisation -----------------------------------------------------------------------------------------


def test_materialisations_are_counted_and_said_once(dense: Tensor) -> None:
    (handle,) = paged_like(dense)
    manager().counters.materializations.clear()
    configure(on_materialize="warn")
    with pytest.warns(UserWarning, match=r"aten\.mean\.default copied a cache of shape \[2, 3, 20, 4\]") as caught:
        handle.mean()
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "handle.mean()" in linecache.getline(__file__, caught[0].lineno)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.mean()
    assert manager().counters.materializations["aten.mean.default"] == 2


def test_materialisation_can_be_forbidden(dense: Tensor) -> None:
    (handle,) = paged_like(dense)
    configure(on_materialize="error")
    with pytest.raises(MaterializationError, match=r"aten\.mean\.default.*\[2, 3, 20, 4\].*configure\(on_materialize"):
        handle.mean()
    torch.cat([handle, tail(1)], dim=2)  # still allowed: nothing is copied


@pytest.mark.parametrize("inference", [False, True])
def test_nothing_that_a_cache_does_copies_tokens(dense: Tensor, no_gather: None, inference: bool) -> None:
    with torch.inference_mode(inference):
        _do_what_caches_do(dense)


def _do_what_caches_do(dense: Tensor) -> None:
    key, value = paged_like(dense, dense + 1)
    forms = [torch.cat([x, tail(5)], dim=2) for x in (key, value)]
    forms += [x.index_select(0, torch.tensor([1, 1, 0])) for x in (key, value)]
    forms += [x[torch.tensor([1, 0])] for x in forms]
    forms += [x[:, :, :7] for x in forms] + [x[..., :-3, :] for x in forms]
    forms += [torch.cat([x, y], dim=0) for x in forms[::2] for y in forms[::2]]
    forms += [part for x in forms for part in (*x.split(1), *x.chunk(2), x[1:])]
    forms += [x.repeat_interleave(2, dim=0) for x in forms]
    forms += [x.clone() for x in forms] + [copy.deepcopy(key), key[:1].expand(3, -1, -1, -1)]
    assert all(isinstance(x, PagedTensor) for x in forms)
    key.index_copy_(2, torch.tensor([3]), tail(1))
    key[:, :, 4:9] = tail(5)
    key.zero_()


# -- meaning -------------------------------------------------------------------------------------------------


def test_old_handles_keep_what_they_meant(dense: Tensor) -> None:
    (root,) = paged_like(dense)
    meant: list[tuple[Tensor, Tensor]] = [(root, dense)]
    for seed in range(12):  # every handle is appended to, the newest and the oldest
        for handle, value in (meant[0], meant[-1], meant[len(meant) // 2]):
            new = tail(1 + seed % 3, seed=seed)
            meant.append((torch.cat([handle, new], dim=2), torch.cat([value, new], dim=2)))
    for handle, value in meant:
        assert torch.equal(handle.dense(), value)


def test_beam_reordering_copies_at_most_the_tail_blocks(dense: Tensor) -> None:
    (handle,) = paged_like(torch.cat([dense] * 2), block_size=16)  # 4 rows of 20 tokens: 1 full block, 1 tail
    counters = manager().counters
    value = torch.cat([dense] * 2)
    for step in range(40):
        rows = torch.tensor([0, 0, 1, 3] if step % 2 else [2, 2, 2, 2])
        before = counters.copies_on_write
        handle, value = handle.index_select(0, rows), value.index_select(0, rows)
        assert counters.copies_on_write == before
        new = tail(1, 4, step)
        handle, value = torch.cat([handle, new], dim=2), torch.cat([value, new], dim=2)
        assert counters.copies_on_write - before <= 4 - len(set(rows.tolist()))
    assert torch.equal(handle.dense(), value)


def test_aliases_see_writes_and_copies_do_not(dense: Tensor) -> None:
    (handle,) = paged_like(dense)
    sees = [handle[:, :, :9], handle[1:], handle.detach(), handle.transpose(1, 2).transpose(1, 2), handle[:, :, 5:]]
    blind = [handle.clone(), handle.index_select(0, torch.tensor([0, 1])), torch.cat([handle, tail(1)], dim=2)]
    blind.append(torch.cat([handle, handle], dim=0))
    handle.fill_(5.0)
    assert all(bool((x == 5.0).all()) for x in sees)
    assert not any(bool((x == 5.0).any()) for x in blind)


@pytest.mark.parametrize("first", ["slice", "index_select"])
def test_a_slice_is_not_taken_for_an_equal_selection(dense: Tensor, first: str) -> None:
    """Both show the same rows; only the slice is an alias."""
    (handle,) = paged_like(dense)
    if first == "slice":
        alias, selected = handle[0:1], handle.index_select(0, torch.tensor([0]))
    else:
        selected, alias = handle.index_select(0, torch.tensor([0])), handle[0:1]
    handle.zero_()
    assert torch.equal(selected.dense(), dense[:1])
    assert not alias.dense().any()


def test_repeated_rows_are_written_apart(dense: Tensor) -> None:
    (handle,) = paged_like(dense)
    twice = handle.index_select(0, torch.tensor([0, 0]))
    twice[0:1].zero_()
    twice[1:2].index_copy_(2, torch.tensor([2]), torch.ones(1, 3, 1, 4))
    wanted = dense[[0, 0]].clone()
    wanted[0] = 0
    wanted[1, :, 2] = 1
    assert torch.equal(twice.dense(), wanted)
    assert torch.equal(handle.dense(), dense)
    with pytest.raises(UnsupportedInputError, match="several elements share one place"):
        handle[:1].expand(2, -1, -1, -1).zero_()


def test_layers_in_any_order(dense: Tensor) -> None:
    """All that K does, also writes in place, before V does the same: V's tokens must not be lost in copies."""
    key, value = paged_like(dense, dense + 1)
    new = tail(3)
    longer = torch.cat([key, new], dim=2)
    fork = longer.clone()
    fork[:, :, 1:] = 0.0
    branches = [torch.cat([longer, tail(1, seed=i)], dim=2) for i in range(3)]
    v_longer = torch.cat([value, new], dim=2)
    wanted = torch.cat([dense + 1, new], dim=2)
    assert torch.equal(v_longer.clone().dense(), wanted)
    for i, branch in enumerate(branches):
        one = tail(1, seed=i)
        assert torch.equal(torch.cat([v_longer, one], dim=2).dense(), torch.cat([wanted, one], dim=2))
        assert torch.equal(branch.dense(), torch.cat([dense, new, one], dim=2))


def test_a_failed_append_leaves_nothing_behind(dense: Tensor) -> None:
    """Also when its traceback is kept: the next try, and the next layer, see sound pages."""
    key, value = paged_like(dense, dense + 1)
    torch.cat([key, tail(2)], dim=2)
    newer = torch.cat([key, tail(2)], dim=2)  # `key` is not the newest: its tail must be copied
    for name in ("execute_copies", "cache_write"):
        with broken(name), pytest.raises(Boom) as kept:
            torch.cat([key, tail(1)], dim=2)
        assert torch.equal(torch.cat([value, tail(1)], dim=2).dense(), torch.cat([dense + 1, tail(1)], dim=2))
        assert torch.equal(torch.cat([key, tail(1)], dim=2).dense(), torch.cat([dense, tail(1)], dim=2))
        manager().check_integrity()
        del kept
    assert torch.equal(newer.dense(), torch.cat([dense, tail(2)], dim=2))


def test_merge_does_not_mistake_new_rows_for_old_ones(dense: Tensor) -> None:
    key, value = paged_like(dense, dense + 1)
    key2, value2 = paged_like(dense + 2, dense + 3)
    merged = torch.cat([key, key2])
    merged.zero_()  # the merged rows are copies now; `value2` is its rows' only owner
    value2.fill_(9.0)
    assert torch.equal(torch.cat([value, value2]).dense(), torch.cat([dense + 1, torch.full_like(dense, 9.0)]))
    assert torch.equal(key2.dense(), dense + 2)


# -- ownership -----------------------------------------------------------------------------------------------


def test_blocks_return_at_once_without_the_collector(dense: Tensor) -> None:
    gc.collect()
    gc.disable()
    try:
        (handle,) = paged_like(dense, block_size=8)
        pool = view_of(handle).group.pool
        used = pool.num_used
        fork = torch.cat([handle.clone(), tail(9)], dim=2)
        crop, part, rows = fork[:, :, :5], fork[:, :, 3:5], fork[1:]
        with broken("cache_write"), pytest.raises(Boom):
            torch.cat([fork, tail(1)], dim=2)
        fork.zero_()
        assert pool.num_used > used
        del fork, crop, part, rows
        assert pool.num_used == used
        del handle
        assert pool.num_used == used - 6
    finally:
        gc.enable()


@torch.inference_mode()  # else torch keeps `handle` alive, as the tensor that `crop` is a view of
def test_a_handle_keeps_its_blocks(dense: Tensor) -> None:
    """Whatever is dropped around it, a handle's blocks are not handed out again while it lives, and only those."""
    (handle,) = paged_like(dense)
    crop = handle[:1, :, :9]
    del handle
    blocks = {block for row in view_of(crop).rows for block in row.blocks}
    assert len(blocks) == 1
    others = paged_like(dense * 2)
    assert not blocks & {block for row in view_of(others[0]).rows for block in row.blocks}
    crop.add_(1)
    assert torch.equal(crop.dense(), dense[:1, :, :9] + 1)
    assert torch.equal(others[0].dense(), dense * 2)


@torch.inference_mode()
def test_an_append_to_a_crop_spares_the_forks_of_its_block(dense: Tensor) -> None:
    """After a crop, a block that a longer row filled may be shared: it is copied before it is written to."""
    (handle,) = paged_like(dense)
    fork = torch.cat([handle[:, :, :16], tail(2)], dim=2)
    crop = handle[:, :, :10]
    del handle
    longer = torch.cat([crop, tail(3, seed=5)], dim=2)
    assert torch.equal(fork.dense(), torch.cat([dense[:, :, :16], tail(2)], dim=2))
    assert torch.equal(longer.dense(), torch.cat([dense[:, :, :10], tail(3, seed=5)], dim=2))


def test_pools_do_not_mix(dense: Tensor) -> None:
    (one,), (other,) = paged_like(dense, block_size=8), paged_like(dense, block_size=16)
    with pytest.raises(PoolMismatchError, match=r"different block pools.*tensor\.dense\(\)"):
        torch.cat([one, other], dim=0)
    assert torch.equal(torch.cat([one.dense(), other.dense()]), torch.cat([dense, dense]))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("stored_as", "kernels"), [(None, True), (torch.int8, False), (torch.int8, True)])
def test_a_token_at_the_begin_of_a_block_is_overwritten_alone(stored_as: torch.dtype | None, kernels: bool) -> None:
    configure(triton_on_cpu=kernels)
    (handle,) = paged_like(torch.randn(2, 3, 40, 16), stored_as=stored_as)
    before = handle.dense()  # type: ignore[attr-defined]
    for position in (16, 0, 32):
        handle[:, :, position] = 1.0
        before[:, :, position] = 1.0
    torch.testing.assert_close(handle.dense(), before)  # type: ignore[attr-defined]


@pytest.mark.parametrize("verified", [False, True])
def test_query_heads_that_broadcast(verified: bool, dense: Tensor) -> None:
    key, value = paged_like(dense, dense + 1)
    if verified:
        key, value = (promote(handle, None) for handle in (key, value))
    query = torch.randn(2, 1, 4, 4)
    with torch.inference_mode():
        out = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, dense, dense + 1))


def test_an_empty_handle_has_an_empty_copy(dense: Tensor) -> None:
    for kernels in (False, True):
        configure(triton_on_cpu=kernels)
        (handle,) = paged_like(dense)
        assert handle[:, :, :0].dense().shape == (2, 3, 0, 4)  # type: ignore[attr-defined]


# -- ragged rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", FUSED, ids=str)
def test_every_devices_operator_of_attention_reads_pages(
    operator: Any, dense: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = paged_like(dense[:, :, :5], dense[:, :, 5:10]), paged_like(dense, dense + 1)
    key, value = (torch.cat([s, x], dim=0) for s, x in zip(short, long))
    query, bias = torch.randn(4, 3, 2, 4), torch.randn(2, 1, 2, 20)
    names = [argument.name for argument in operator._schema.arguments]
    required = {"compute_log_sumexp": False} if "compute_log_sumexp" in names else {}
    mask = next((name for name in names if name in ("attn_mask", "attn_bias")), None)
    unmasked = required if mask is None else {mask: None, **required}
    wanted = torch.cat(
        [
            F.scaled_dot_product_attention(query[:2], dense[:, :, :5], dense[:, :, 5:10], scale=0.4),
            F.scaled_dot_product_attention(query[2:], dense, dense + 1, scale=0.4),
        ]
    )
    with torch.inference_mode():  # else torch takes the `math` one apart before it reaches the handles
        with monkeypatch.context() as patched:
            patched.setattr(ops, "gather", lambda *args: pytest.fail("tokens were copied"))
            out, *others = operator(query, key, value, **unmasked, scale=0.4)
            if mask is not None:
                masked = operator(query[:2], *long, **{mask: bias, **required})[0]
                torch.testing.assert_close(masked, F.scaled_dot_product_attention(query[:2], dense, dense + 1, bias))
        parted = value.clone()  # K and V no longer share a view: attention on dense copies
        on_copies = operator(query, key, parted, **unmasked, scale=0.4)[0]
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(on_copies, wanted)
    assert [type(x) for x in others] == [
        Tensor if "Tensor" in str(x.type) else int for x in operator._schema.returns[1:]
    ]


def test_ragged_rows_read_zeros_and_attention_skips_them(dense: Tensor) -> None:
    short, long = paged_like(dense[:, :, :5], dense[:, :, 5:10]), paged_like(dense, dense + 1)
    key, value = (torch.cat([s, x], dim=0) for s, x in zip(short, long))
    wanted_key = torch.cat([F.pad(dense[:, :, :5], (0, 0, 15, 0)), dense])
    wanted_value = torch.cat([F.pad(dense[:, :, 5:10], (0, 0, 15, 0)), dense + 1])
    assert torch.equal(key.dense(), wanted_key)  # type: ignore[attr-defined]
    query = torch.randn(4, 3, 2, 4)
    out = F.scaled_dot_product_attention(query, key, value)
    alone = F.scaled_dot_product_attention(query[:2], dense[:, :, :5], dense[:, :, 5:10])
    torch.testing.assert_close(out[:2], alone)
    everything = torch.ones(4, 1, 2, 20, dtype=torch.bool)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=everything)  # the mask decides: zeros count
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, wanted_key, wanted_value))
    parted = value.clone()  # K and V no longer share a view: attention on dense copies, the same meaning
    for is_causal in (False, True):
        out = F.scaled_dot_product_attention(query, key, parted, is_causal=is_causal)
        wanted = attention(query, wanted_key, wanted_value, [15, 15, 0, 0], None, is_causal)
        torch.testing.assert_close(out, wanted)


# -- threads -------------------------------------------------------------------------------------------------


def test_sixteen_threads(dense: Tensor) -> None:
    key, value = paged_like(dense, dense + 1)
    used = view_of(key).group.pool.num_used
    faults: list[str] = []
    barrier = threading.Barrier(16)

    def work(seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        mine: list[tuple[Tensor, Tensor, Tensor]] = []
        barrier.wait()
        for step in range(40):
            k, v, wanted = mine[step % len(mine)] if mine and step % 3 else (key, value, dense)
            new = tail(1 + step % 5, k.shape[0], seed * 100 + step)
            if step % 5 == 4:
                rows = torch.randint(0, k.shape[0], (2,), generator=random)
                k, v, wanted = k[rows], v[rows], wanted[rows]
            elif step % 7 == 6:
                k, v, wanted = k.clone(), v.clone(), wanted.clone()
                for x in (k, v, wanted):
                    x[:, :, 1:4] = float(seed)
                v[:, :, 1:4] += 1
            else:
                k, v, wanted = (torch.cat([x, n], dim=2) for x, n in ((k, new), (v, new + 1), (wanted, new)))
            mine = [*mine[-3:], (k, v, wanted)]
            for a, b, c in mine:
                if not torch.equal(a.dense(), c) or not torch.allclose(b.dense(), c + 1):  # type: ignore[attr-defined]
                    faults.append(f"thread {seed}, step {step}")

    def guarded(seed: int) -> None:
        try:
            work(seed)
        except BaseException as error:
            faults.append(repr(error))

    threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults, faults[:3]
    manager().check_integrity()
    assert torch.equal(key.dense(), dense)
    assert view_of(key).group.pool.num_used == used
