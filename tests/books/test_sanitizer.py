"""Debug mode: injected faults are found and named, and code without faults runs as before."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import paged_inductor
from paged_inductor import SanitizerError, check_leaks, configure
from paged_inductor.runtime import CacheGroup, Manager, SiteSpec, View, manager
from paged_inductor.runtime.names import BlockName

from ..models.zoo import Decoder, Form, generate

CPU = torch.device("cpu")
SITES = (SiteSpec(2, 8, torch.float32, CPU), SiteSpec(1, 4, torch.int8, CPU))


@pytest.fixture
def runtime() -> Manager:
    """A manager of its own, which watches."""
    own = Manager()
    own.sanitize(True)
    return own


@pytest.fixture
def watched() -> Iterator[None]:
    """The process's manager watches."""
    gc.collect()
    configure(sanitize=True, on_materialize="silent")
    yield
    paged_inductor.reset()
    assert all(group.sanitizer is None for group in manager().groups)
    paged_inductor.check_integrity()


def group_of(runtime: Manager) -> CacheGroup:
    return runtime.group(SITES, 16)


def made(runtime: Manager, tokens: int = 40, batch: int = 1) -> View:
    return runtime.create(group_of(runtime), batch, tokens, "mine").view


def use(runtime: Manager, view: View) -> None:
    with runtime.using(view):
        runtime.schedule(view)


def free_behind_the_back(runtime: Manager, block: int) -> None:
    with runtime.locked():
        group_of(runtime).pool.release(block)


def test_a_freed_block_that_is_still_read(runtime: Manager) -> None:
    view = made(runtime)
    use(runtime, view)
    block = view.rows[0].blocks[1]
    free_behind_the_back(runtime, block)
    with pytest.raises(SanitizerError) as caught:
        use(runtime, view)
    message = str(caught.value)
    assert (
        f"row 0 of a cache of mine (tenant 'default', 40 tokens) has block {block} for tokens 16 and after" in message
    )
    assert "of generation 0, but the block's is 1" in message
    freed, read = message.split("and is read at")
    assert "test_sanitizer.py" in freed and "in free_behind_the_back" in freed
    assert "in use" in read and "in free_behind_the_back" not in read
    runtime.check_integrity()  # they were rebuilt from the tables
    use(runtime, made(runtime))


def test_a_freed_block_that_belongs_to_somebody_else_meanwhile(runtime: Manager) -> None:
    view = made(runtime)
    free_behind_the_back(runtime, view.rows[0].blocks[2])
    other = made(runtime, 16)
    assert other.rows[0].blocks == view.rows[0].blocks[2:]
    use(runtime, other)
    with pytest.raises(SanitizerError, match="stale read: row 0"):
        use(runtime, view)


@pytest.mark.parametrize("how", ["append", "fork", "overwrite"])
def test_what_is_made_of_a_stale_view_is_stale(runtime: Manager, how: str) -> None:
    view = made(runtime)
    free_behind_the_back(runtime, view.rows[0].blocks[0])
    again = made(runtime, 16)

    def derived() -> None:
        if how == "append":
            runtime.append(view, 1)
        elif how == "fork":
            use(runtime, runtime.derive(view, view.rows, view.lengths, view.length))
        else:
            runtime.unshare(view.group, [([(view, 0)], 0, 5)], "mine")

    with pytest.raises(SanitizerError, match="stale read"):
        derived()
    del again


def test_a_block_freed_while_a_step_reads_it(runtime: Manager) -> None:
    view = made(runtime)

    def step() -> None:
        with runtime.using(view):
            free_behind_the_back(runtime, view.rows[0].blocks[0])

    with pytest.raises(SanitizerError, match="stale read"):
        step()
    assert runtime.running_steps == 0


def test_a_block_freed_twice(runtime: Manager) -> None:
    view = made(runtime)
    block = view.rows[0].blocks[0]
    free_behind_the_back(runtime, block)
    with pytest.raises(SanitizerError, match=f"block {block} is released, but it is free already") as caught:
        free_behind_the_back(runtime, block)
    assert str(caught.value).count("in free_behind_the_back") == 2


def test_a_table_that_says_something_else(runtime: Manager) -> None:
    view = made(runtime)
    use(runtime, view)
    view.rows[0].blocks.reverse()
    with pytest.raises(SanitizerError, match="the kernels' table of a cache of mine .* is stale: row 0 has block"):
        use(runtime, view)


def test_a_table_that_is_too_short(runtime: Manager) -> None:
    view = made(runtime)
    view.rows[0].blocks.pop()
    with pytest.raises(SanitizerError, match="has 2 blocks for 40 tokens"):
        use(runtime, view)


def test_a_source_of_a_copy_that_is_free(runtime: Manager) -> None:
    view = made(runtime)
    longer = runtime.append(view, 1).view
    step = runtime.append(view, 1)
    source = step.copies[0][0]
    del view, longer
    with pytest.raises(SanitizerError, match=rf"block {source}, which is to be copied .*, is free") as caught:
        use(runtime, step.view)
    assert "in test_a_source_of_a_copy_that_is_free" in str(caught.value)


def test_what_a_static_cache_copies_is_kept_until_then(runtime: Manager) -> None:
    group = group_of(runtime)
    first = runtime.create_static(group, 1, 64, "static")
    runtime.extend(first, 10)
    use(runtime, first)
    second = runtime.derive(first, first.rows, first.lengths, first.length)
    runtime.extend(first, 20)
    use(runtime, first)
    group.arenas[0][first.rows[0].blocks] = 1
    ((source, target),) = runtime.extend(second, 12)
    del first  # by another thread, say
    with runtime.using(second):
        assert (group.arenas[0][source] == 1).all()
    assert second.rows[0].blocks == [target]
    with runtime.locked():
        assert group.pool.num_used == 1


def test_writes_to_the_zero_page(runtime: Manager) -> None:
    view = made(runtime)
    group_of(runtime).arenas[1][0, 0, 3] = 7
    with pytest.raises(SanitizerError, match="something wrote to the zero page of site 1"):
        use(runtime, view)


def test_freed_and_new_blocks_are_poisoned(runtime: Manager) -> None:
    group = group_of(runtime)
    view = made(runtime)
    blocks = list(view.rows[0].blocks)
    assert group.arenas[0][blocks].isnan().all()
    for arena in group.arenas:
        arena[blocks] = 1
    with torch.inference_mode():  # wherever it dies
        del view
    assert group.arenas[0][blocks].isnan().all()
    assert (group.arenas[1][blocks] == 127).all()
    assert not group.arenas[0][0].any()


def test_cached_blocks_are_poisoned_when_they_are_evicted() -> None:
    runtime = Manager()
    group = group_of(runtime)
    view = made(runtime, 16)
    (block,) = view.rows[0].blocks
    group.arenas[0][block] = 1
    group.pool.index.add(block, BlockName("anybody", b"digest", b"parent", b"key", 0))
    del view
    assert used_and_cached(group) == (0, 1)
    runtime.sanitize(True)
    assert (group.arenas[0][block] == 1).all()
    with runtime.locked():
        group.pool.evict(1)
    assert used_and_cached(group) == (0, 0)
    assert group.arenas[0][block].isnan().all()


def used_and_cached(group: CacheGroup) -> tuple[int, int]:
    return group.pool.num_used, group.pool.num_cached


def test_swapping_and_compaction_are_no_faults(runtime: Manager) -> None:
    group = group_of(runtime)
    first, second = made(runtime), made(runtime)
    use(runtime, second)
    for arena in group.arenas:
        arena[second.rows[0].blocks] = 5
    configure(swap_host="1MiB")
    with runtime.locked():
        runtime.swap.out(group, 3, first.rows)
    assert min(second.rows[0].blocks) < 0
    longer = runtime.append(second, 30).view
    use(runtime, longer)
    assert (group.arenas[0][second.rows[0].blocks[:2]] == 5).all()
    del first
    runtime.trim()
    use(runtime, longer)
    assert (group.arenas[1][second.rows[0].blocks[:2]] == 5).all()
    configure(swap_host=None)


def test_leaks_are_named_with_who_made_them(watched: None) -> None:
    def makes_a_leak() -> torch.Tensor:
        x = torch.randn(1, 2, 20, 8)
        return generate(model, torch.randint(0, 61, (1, 20)), 1)[1] if x is not None else x

    model = paged_inductor.page(Decoder(Form()), inner="eager", label="leaking")
    check_leaks()
    held = makes_a_leak()
    with pytest.raises(SanitizerError, match=r"1 cache view\(s\) are still alive:\n21 tokens of leaking") as caught:
        check_leaks()
    assert "in makes_a_leak" in str(caught.value)
    leak = caught.value.leaks[0]
    assert (leak.tokens, leak.bytes, leak.tenant) == (21, 2 * 16 * 256, "default")  # type: ignore[attr-defined]
    del held, caught
    check_leaks()


def test_a_model_runs_as_before(watched: None) -> None:
    torch.manual_seed(1)
    model = Decoder(Form(), layers=1)
    prompt = torch.randint(0, 61, (3, 14))
    expected, _ = generate(model, prompt, 6)
    paged_inductor.page(model, inner="eager", label="sound")
    tokens, past = generate(model, prompt, 6)
    assert torch.equal(tokens, expected)
    forked = [tuple(t[[2, 0, 0]] for t in layer) for layer in past]
    forked = model(tokens[:, -1:], forked)[1]
    forked[0][0][:, :, 3] = 0.5
    assert (forked[0][0].dense()[:, :, 3] == 0.5).all()
    del past, forked
    paged_inductor.trim()
    assert torch.equal(generate(model, prompt, 6)[0], expected)


def test_a_faulty_model_is_stopped(watched: None) -> None:
    torch.manual_seed(1)
    model = paged_inductor.page(Decoder(Form(), layers=1), inner="eager", label="faulty")
    tokens, past = generate(model, torch.randint(0, 61, (2, 20)), 2)
    view = past[0][0]._view
    with manager().locked():
        view.group.pool.release(view.rows[1].blocks[0])
    with pytest.raises(SanitizerError, match="stale read: row 1 of a cache of faulty"):
        model(tokens[:, -1:], past)
    with pytest.raises(SanitizerError, match="stale read"):
        past[0][0].dense()
    paged_inductor.check_integrity()


LEAKING = """
import torch, paged_inductor
from paged_inductor.runtime import SiteSpec, manager

def makes_it():
    sites = (SiteSpec(2, 8, torch.float32, torch.device("cpu")),)
    return manager().create(manager().group(sites, 16), 1, 20, "forgotten").view

kept = makes_it()
"""


def test_leaks_are_reported_at_exit(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LEAKING)
    environment = {**os.environ, "PAGED_INDUCTOR_SANITIZE": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Exception ignored" not in done.stderr
    assert "paged_inductor sanitizer: 1 cache view(s) are still alive:\n20 tokens of forgotten" in done.stderr
    assert f"{script}:7 in makes_it" in done.stderr and f"{script}:9 in <module>" in done.stderr


def test_it_is_off_unless_asked_for() -> None:
    own = Manager()
    view = made(own)
    assert group_of(own).sanitizer is None and group_of(own).pool.watcher is None
    assert view.rows[0].stamps is None
    own.sanitize(True)
    use(own, view)  # it was made before
    longer = own.append(view, 1).view
    own.sanitize(False)
    longest = own.append(longer, 40).view
    own.sanitize(True)
    use(own, longest)
