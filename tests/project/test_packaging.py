"""The wheel and the sdist hold the whole package, and the package works installed and from a bare checkout."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("packaging")  # the build writes beside the sources

ROOT = Path(__file__).resolve().parents[2]

LOOP = """
import torch

assert "paged_inductor" in torch._dynamo.list_backends(), "no entry point"

def step(cache_k, cache_v, x):
    k = torch.cat((cache_k, x), 2)
    v = torch.cat((cache_v, x * 2), 2)
    return torch.nn.functional.scaled_dot_product_attention(x, k, v), k, v

def loop(step):
    torch.manual_seed(0)
    k = v = torch.empty(1, 2, 0, 8)
    outs = []
    for _ in range(5):
        out, k, v = step(k, v, torch.randn(1, 2, 1, 8))
        outs.append(out)
    return torch.cat(outs, 2), k

with torch.no_grad():
    dense, _ = loop(step)
    paged, k = loop(torch.compile(step, backend="paged_inductor", options={"inner": "eager"}))
torch.testing.assert_close(dense, paged)

import paged_inductor

assert isinstance(k, paged_inductor.PagedTensor), type(k)
assert paged_inductor.stats().tokens == 5
print(paged_inductor.__file__)
"""


def python(executable: str | Path, code: str, cwd: Path, **environment: str) -> str:
    """Run `code`; returns what it printed. The environment has no PYTHONPATH but the one given."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(executable), "-c", code], cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist; the wheel is built from the sdist, as package indexes expect."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def source_files() -> set[str]:
    folders = [ROOT / "paged_inductor", *(ROOT / "paged_inductor" / name for name in ("kernels", "passes"))]
    return {str(file.relative_to(ROOT)) for folder in folders for file in folder.rglob("*.py")}


def test_the_wheel_holds_every_module_and_nothing_at_top_level(built: Path) -> None:
    names = set(zipfile.ZipFile(next(built.glob("*.whl"))).namelist())
    assert source_files() <= names
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"paged_inductor"}
    assert "paged_inductor/py.typed" in names


def test_the_sdist_holds_every_module(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    assert source_files() <= members.keys()
    assert members["paged_inductor/kernels/__init__.py"].isreg()
    assert "LICENSE" in members
    assert "README.md" in members


def test_the_installed_wheel_runs(built: Path, tmp_path: Path) -> None:
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=True)
    executable = home / "bin" / "python"
    target = Path(python(executable, "import sysconfig; print(sysconfig.get_path('purelib'))", tmp_path))
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    subprocess.run([*install, str(next(built.glob("*.whl")))], check=True, capture_output=True)
    # torch and triton are those of this environment: behind the new package on the path, without its .pth files
    borrowed = [path for path in site.getsitepackages() if Path(path).is_dir()]
    (target / "borrowed.pth").write_text("\n".join(borrowed))
    where = python(executable, LOOP, tmp_path)
    assert Path(where).is_relative_to(home)
    assert python(executable, "import importlib.util as u; print(u.find_spec('passes'))", tmp_path) == "None"


def test_a_bare_checkout_runs(tmp_path: Path) -> None:
    """Without an entry point, importing the package registers the backend."""
    code = "import paged_inductor\n" + LOOP
    assert Path(python(sys.executable, code, tmp_path, PYTHONPATH=str(ROOT))).is_relative_to(ROOT)
