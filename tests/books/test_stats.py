"""`stats()`: every figure, from loops whose books can be counted by hand."""

from __future__ import annotations

import json
import random

import pytest
import torch

import paged_inductor
from paged_inductor import tenant
from paged_inductor.runtime import CacheGroup, Manager, SiteSpec, manager
from paged_inductor.runtime.latency import Histogram

from ..models.zoo import Decoder, Form, generate

SITE = SiteSpec(2, 8, torch.float32, torch.device("cpu"))
BLOCK = 16 * 2 * 8 * 4


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Manager:
    """A manager of its own, which `stats` and `tenant` speak to."""
    own = Manager()
    for module in ("tenancy", "monitor"):
        monkeypatch.setattr(f"paged_inductor.{module}.manager", lambda: own)
    return own


def group_of(runtime: Manager) -> CacheGroup:
    return runtime.group((SITE,), 16)


def test_blocks_bytes_and_waste(runtime: Manager) -> None:
    view = runtime.create(group_of(runtime), 2, 20, "two").view
    fork = runtime.derive(view, view.rows[:1], view.lengths[:1], view.length)
    now = paged_inductor.stats()
    assert (now.blocks_used, now.shared_blocks, now.swapped_blocks, now.cached_blocks) == (4, 0, 0, 0)
    assert now.blocks_free == now.blocks_total - 4
    assert (now.tokens, now.sequences) == (40, 2)
    assert now.bytes_used == 4 * BLOCK
    assert now.bytes_wasted == 4 * BLOCK - 40 * SITE.token_bytes
    assert now.utilization == 40 / 64
    assert now.bytes_budget is not None and now.bytes_budget > now.bytes_reserved
    longer = runtime.append(fork, 1).view  # the other view still sees 20 tokens: the tail is extended in place
    other = runtime.append(view, 1).view  # and here copied for the first row
    now = paged_inductor.stats()
    assert (now.copies_on_write, now.shared_blocks, now.sequences, now.blocks_used) == (1, 1, 3, 5)
    lines = str(now).splitlines()
    assert lines[0].startswith("blocks  5 used (1 shared), 0 cached, ") and lines[1].startswith("memory  ")
    assert lines[2].endswith(" tokens of 3 sequences, 0 running steps") and "1 copies on write" in lines[3]
    del view, fork, longer, other
    assert paged_inductor.stats().blocks_used == 0


def test_a_model_in_two_groups_has_its_sequences_once(runtime: Manager) -> None:
    other = runtime.group((SITE, SITE), 16)
    views = [runtime.create(group, 3, 5, "hybrid").view for group in (group_of(runtime), other)]
    views.append(runtime.create(other, 2, 5, "another").view)
    assert paged_inductor.stats().sequences == 5


def test_every_tenant_has_its_share(runtime: Manager) -> None:
    with tenant("a", quota=10 * BLOCK):
        held = runtime.create(group_of(runtime), 1, 40, "held").view
    with tenant("b"):
        fork = runtime.derive(held, held.rows, held.lengths, held.length)
        longer = runtime.append(held, 16).view
    found = paged_inductor.stats().tenants
    assert list(found) == ["default", "a", "b"]
    assert (found["a"].blocks_used, found["a"].bytes_used, found["a"].quota) == (3, 3 * BLOCK, 10 * BLOCK)
    assert (found["b"].blocks_used, found["b"].bytes_used, found["b"].quota) == (1, BLOCK, None)
    assert found["default"].blocks_used == 0
    del held, fork, longer


def test_running_steps(runtime: Manager) -> None:
    groups = [group_of(runtime), runtime.group((SITE, SITE), 16)]
    views = [runtime.create(group, 1, 5, "hybrid").view for group in groups]
    with runtime.using(*views):
        assert paged_inductor.stats().running_steps == 1
        with runtime.using(views[0]):
            assert paged_inductor.stats().running_steps == 2
    assert paged_inductor.stats().running_steps == 0


def test_steps_of_a_model_are_timed_by_program_and_tenant() -> None:
    torch.manual_seed(0)
    model = Decoder(Form())
    paged_inductor.page(model, inner="eager", label="timed")
    with tenant("books-a"):
        generate(model, torch.randint(0, 61, (2, 5)), 6)
    generate(model, torch.randint(0, 61, (2, 5)), 4)
    now = paged_inductor.stats()
    counts = {(found.tenant, found.phase): found.count for found in now.latencies if found.program == "timed"}
    prompts = {(name, "prefill"): 1 for name in ("default", "books-a")}
    assert counts == {**prompts, ("default", "decode"): 4, ("books-a", "decode"): 6}
    assert now.tenants["books-a"].steps == 7
    for latency in now.latencies:
        assert 0 < latency.p50 <= latency.p95 <= latency.p99
        assert latency.mean > 0
    assert json.loads(json.dumps(now.as_dict()))["tenants"]["books-a"]["steps"] == 7
    paged_inductor.reset()
    assert paged_inductor.stats().latencies == []
    assert manager().running_steps == 0


def test_quantiles_are_at_most_an_eighth_too_high() -> None:
    draw = random.Random(0)
    times = [draw.randrange(1 << draw.randrange(4, 42)) for _ in range(3000)]
    histogram = Histogram()
    for time in times:
        histogram.record(time)
    times.sort()
    for share in (0.01, 0.5, 0.95, 0.99, 1.0):
        exact = times[max(1, -(-round(share * 100) * len(times) // 100)) - 1] / 1e9
        assert exact < histogram.quantile(share) <= exact * 1.125 + 2e-9
    assert histogram.count == 3000
    assert histogram.total == pytest.approx(sum(times) / 1e9)
    for bound, below in histogram.buckets():
        assert below == sum(time < bound * 1e9 for time in times)


def test_an_empty_histogram_and_the_longest_time() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) == 0.0
    histogram.record(1 << 80)
    histogram.record(0)
    assert histogram.count == 2
    assert histogram.quantile(0.1) == pytest.approx(1e-9)
