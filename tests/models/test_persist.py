"""Caches in files: the same tokens in another process, and nothing but those."""

from __future__ import annotations

import collections
import functools
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import paged_inductor
from paged_inductor import PagedTensor, SavedCacheError, persist
from paged_inductor.skeleton import SkeletonReader

from .test_stacked import OneTensor
from .zoo import Decoder, Form, generate


@pytest.fixture
def formula() -> None:
    """Compiled code, as in the other processes that these tests start."""


ROOT = Path(__file__).resolve().parents[2]


def paged_model(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return paged_inductor.page(Decoder(Form()), inner="eager")


def prompt(batch: int = 2, length: int = 21) -> torch.Tensor:
    return torch.randint(0, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def flat(past: Any) -> list[Any]:
    return [tensor for pair in past for tensor in pair]


def step(model: Any, past: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt()[:, -1:], past)[0]


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Any, Path]:
    model = paged_model()
    _, past = generate(model, prompt(), 10)
    path = tmp_path / "cache.kv"
    paged_inductor.save(past, path)
    return model, past, path


@functools.cache
def saved_bytes() -> bytes:
    """A file's contents, for tests that need no model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cache.kv"
        paged_inductor.save(generate(paged_model(), prompt(), 10)[1], path)
        return path.read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "cache.kv"
    path.write_bytes(saved_bytes())
    return path


def test_a_cache_comes_back(saved: Any) -> None:
    model, past, path = saved
    loaded = paged_inductor.load(path)
    assert all(torch.equal(a.dense(), b.dense()) for a, b in zip(flat(past), flat(loaded), strict=True))
    assert torch.equal(step(model, loaded), step(model, past))
    assert len({id(tensor._view) for tensor in flat(loaded)}) == 1
    paged_inductor.check_integrity()
    del loaded
    paged_inductor.check_integrity()


def test_in_another_process(saved: Any) -> None:
    model, past, path = saved
    program = (
        "import sys, torch, paged_inductor\n"
        "from tests.models.test_persist import *\n"
        "logits = step(paged_model(), paged_inductor.load(sys.argv[1]))\n"
        "torch.save(logits, sys.argv[1] + '.logits')\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run([sys.executable, "-c", program, str(path)], check=True, env=environment, cwd=ROOT)
    torch.testing.assert_close(torch.load(f"{path}.logits"), step(model, past))


def test_shared_blocks_are_written_once_and_shared_again(tmp_path: Path) -> None:
    model = paged_model()
    with torch.no_grad():
        _, past = model(prompt(1, 160), None)
    one, many = tmp_path / "one.kv", tmp_path / "many.kv"
    paged_inductor.save(past, one)
    rows = [tuple(tensor.repeat_interleave(8, 0) for tensor in pair) for pair in past]
    paged_inductor.save((past, rows), many)
    assert os.path.getsize(many) < 1.2 * os.path.getsize(one)
    del past, rows
    before = paged_inductor.stats().blocks_used
    single, loaded = paged_inductor.load(many)
    assert paged_inductor.stats().blocks_used == before + 10
    assert torch.equal(flat(loaded)[0].dense(), flat(single)[0].dense().expand(8, -1, -1, -1))


def test_swapped_ragged_stacked_and_plain_tensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = paged_inductor.page(OneTensor(), inner="eager")
    with torch.no_grad():
        _, stack = model(prompt(), None)
        a, b = paged_model()(prompt(1, 5), None)[1], paged_model()(prompt(2, 30), None)[1]
    ragged = torch.cat([a[0][0], b[0][0]], 0)
    cache = {
        "stack": stack,
        "ragged": ragged,
        "n": 3,
        "plain": torch.arange(4),
        "part": ragged.transpose(1, 2)[..., :2],
    }
    paged_inductor.configure(swap_host="1GiB")
    runtime = paged_inductor.runtime.manager()
    with runtime.locked():
        runtime.swap.out(ragged._view.group, 1000, ())
    assert any(block < 0 for row in ragged._view.rows for block in row.blocks)
    values = {key: value.dense() if hasattr(value, "dense") else value for key, value in cache.items()}
    paged_inductor.save(cache, tmp_path / "x")
    loaded = paged_inductor.load(tmp_path / "x")
    assert loaded["n"] == 3
    assert isinstance(loaded["stack"], paged_inductor.PagedStack)
    for key in ("stack", "ragged", "plain", "part"):
        value = loaded[key]
        assert torch.equal(
            value.dense() if isinstance(value, paged_inductor.PagedStack | PagedTensor) else value,
            values[key].dense() if hasattr(values[key], "dense") else values[key],
        )
    paged_inductor._config.reset_config()


def test_transformers_caches(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = paged_inductor.page(transformers.LlamaForCausalLM(config).eval(), inner="eager")
    with torch.no_grad():
        cache = model(prompt(), use_cache=True).past_key_values
        paged_inductor.save(cache, tmp_path / "cache", model=model)
        loaded = paged_inductor.load(tmp_path / "cache", model=model)
        assert type(loaded) is type(cache)
        token = torch.tensor([[5], [6]])
        assert torch.equal(model(token, past_key_values=loaded).logits, model(token, past_key_values=cache).logits)


def test_another_models_file_is_refused(tmp_path: Path) -> None:
    model, other = paged_model(), paged_model(seed=1)
    with torch.no_grad():
        _, past = model(prompt(), None)
    paged_inductor.save(past, tmp_path / "c", model=model)
    for wrong, why in ((other, "this Decoder is another"), (None, "no model was given")):
        with pytest.raises(SavedCacheError, match=why):
            paged_inductor.load(tmp_path / "c", model=wrong)
    with torch.no_grad():
        model.head.weight.mul_(1.5)
    with pytest.raises(SavedCacheError, match="was changed"):
        paged_inductor.load(tmp_path / "c", model=model)


@pytest.mark.parametrize("place", [0, 25, 40, 200, -300, -1])
@pytest.mark.parametrize("fault", ["changed", "cut off"])
def test_damaged_files_are_refused(path: Path, place: int, fault: str) -> None:
    data = bytearray(path.read_bytes())
    place %= len(data)
    if fault == "changed":
        data[place] ^= 0x10
    path.write_bytes(data if fault == "changed" else data[:place])
    before = paged_inductor.stats().blocks_used
    with pytest.raises(SavedCacheError):
        paged_inductor.load(path)
    assert paged_inductor.stats().blocks_used == before
    paged_inductor.check_integrity()


def test_a_longer_file_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(SavedCacheError, match="behind its end"):
        paged_inductor.load(path)


class Own:
    def __init__(self, past: Any) -> None:
        self.past = past


def test_classes_are_loaded_only_when_allowed(tmp_path: Path) -> None:
    model = paged_model()
    with torch.no_grad():
        _, past = model(prompt(), None)
    paged_inductor.save(Own(collections.OrderedDict(past=past)), tmp_path / "own")
    with pytest.raises(SavedCacheError, match=r"Own.*allow=\[Own\]"):
        paged_inductor.load(tmp_path / "own")
    loaded = paged_inductor.load(tmp_path / "own", allow=[Own])
    assert torch.equal(step(model, loaded.past["past"]), step(model, past))


def test_an_object_that_cannot_be_pickled(tmp_path: Path) -> None:
    with pytest.raises(SavedCacheError, match="cannot be saved"):
        paged_inductor.save(lambda: 0, tmp_path / "x")
    assert os.listdir(tmp_path) == []


def test_a_failing_save_leaves_the_old_file(saved: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, past, path = saved
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        paged_inductor.save(past, path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_step_meanwhile_and_what_others_left_in_the_blocks_are_not_saved(tmp_path: Path) -> None:
    model = paged_model()
    with torch.no_grad():
        _, past = model(prompt(), None)
    values = [tensor.dense() for tensor in flat(past)]
    view = flat(past)[0]._view
    section, sections, longer = persist._SavedGroup.sections, [], []

    def stepped(group: Any) -> Any:
        longer.append(step(model, past))  # after the look at the books, a step fills a slot behind these tokens
        sections.append(list(section(group)))
        return iter(sections[-1])

    with mock.patch.object(persist._SavedGroup, "sections", stepped):
        paged_inductor.save(past, tmp_path / "cache.kv")
    assert len(longer) == len(sections) == 1
    for site, (saved, arena) in enumerate(zip(sections[-1], view.group.arenas, strict=True)):
        assert view.group.sites[site].stored(saved)[1::2, :, view.length % 16 :].eq(0).all()
        assert arena[:, :, view.length % 16 :].ne(0).any()
    loaded = paged_inductor.load(tmp_path / "cache.kv")
    assert all(torch.equal(a.dense(), b) for a, b in zip(flat(loaded), values, strict=True))


FORGED: dict[str, Any] = {
    "a block that is not there": lambda h: h["groups"][0]["tables"][0].__setitem__(0, 99),
    "a negative block": lambda h: h["groups"][0]["tables"][0].__setitem__(0, -1),
    "more tokens than blocks": lambda h: h["groups"][0]["views"][0][1].__setitem__(0, 10000),
    "fewer than no tokens": lambda h: h["groups"][0]["views"][0][1].__setitem__(0, -3),
    "a row that is not there": lambda h: h["groups"][0]["views"][0][0].__setitem__(0, 7),
    "more blocks than bytes": lambda h: h["groups"][0].__setitem__("blocks", 10**9),
    "a function for a dtype": lambda h: h["groups"][0]["sites"][0].__setitem__(2, "load"),
    "blocks of nothing": lambda h: h["groups"][0].__setitem__("block_size", 0),
    "a site that is not there": lambda h: h["handles"][0].__setitem__(2, 77),
    "unknown axes": lambda h: h["handles"][0].__setitem__(3, "BHSX"),
    "no groups": lambda h: h.pop("groups"),
    "a section without end": lambda h: h["skeleton"].__setitem__("bytes", 2**62),
    "a checksum too few": lambda h: h["groups"][0]["crcs"].pop(),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_header_that_contradicts_itself(path: Path, name: str) -> None:
    data, at = path.read_bytes(), len(persist.MAGIC)
    size, _ = struct.unpack("<QI", data[at : at + 12])
    header = json.loads(data[at + 12 : at + 12 + size])
    FORGED[name](header)
    text = json.dumps(header).encode()
    forged = data[:at] + struct.pack("<QI", len(text), zlib.crc32(text)) + text + data[at + 12 + size :]
    path.write_bytes(forged)
    before = paged_inductor.check_integrity()
    with pytest.raises(SavedCacheError, match="contradicts itself"):
        paged_inductor.load(path)
    assert paged_inductor.check_integrity() == before


def test_only_classes_of_transformers_caches_are_named(path: Path) -> None:
    cache_utils = pytest.importorskip("transformers.cache_utils")
    for name in ("torch", "is_torchdynamo_compiling", "PreTrainedConfig", "abstractmethod"):
        assert hasattr(cache_utils, name)
        data = b"ctransformers.cache_utils\n" + name.encode() + b"\n."
        with pytest.raises(SavedCacheError, match=name):
            SkeletonReader(io.BytesIO(data), {}, set(), path).load()
