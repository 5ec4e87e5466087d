"""Imports run one way: backend -> passes -> ops -> kernels, and backend -> runtime."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "paged_inductor"

# What each part of the package may import of the others. A new module is entered here with its place.
MAY_IMPORT: dict[str, set[str]] = {
    "_amounts": set(),
    "_callers": set(),
    "_errors": set(),
    "_layout": set(),
    "kernels": {"_callers"},
    "difference": set(),
    "sizes": {"passes"},
    "_config": {"_errors", "_layout"},
    "ops": {"kernels", "_config", "_errors", "_layout"},
    "inner": {"ops"},
    "passes": {"ops", "_errors", "_layout"},
    "runtime": {"_amounts", "_config", "_errors", "_layout"},
    "tensor": {"difference", "ops", "runtime", "_callers", "_config", "_errors", "_layout"},
    "reports": {"passes"},
    "positions": {"passes", "sizes"},
    "triangles": set(),
    "weights": set(),
    "token_names": {"runtime"},
    "sharer": {"passes", "runtime", "sizes", "token_names", "weights", "group_plan", "step"},
    "prefixes": {"runtime", "sharer", "_config", "_errors"},
    "transformers_caches": {"runtime", "tensor"},
    "prompts": {"runtime", "sharer", "token_names"},
    "reuse": {"transformers_caches", "prompts", "runtime", "sharer"},
    "plain_caches": {"runtime", "tensor"},
    "plain_reuse": {"plain_caches", "prompts", "runtime", "sharer", "tensor", "_errors"},
    "step": {"runtime", "tensor", "positions", "_layout"},
    "group_plan": {"_layout", "passes", "runtime", "tensor", "sizes", "positions", "step"},
    "replay": {"group_plan", "passes", "runtime"},
    "program": {
        "ops",
        "passes",
        "runtime",
        "tensor",
        "group_plan",
        "replay",
        "sharer",
        "sizes",
        "step",
        "triangles",
        "_callers",
    },
    "adoption": {"passes", "runtime", "tensor"},
    "dense_run": {"tensor"},
    "verified": {
        "dense_run",
        "group_plan",
        "triangles",
        "passes",
        "program",
        "step",
        "tensor",
        "difference",
        "_errors",
    },
    "stacked": {"passes", "program", "tensor"},
    "backend": {
        "group_plan",
        "stacked",
        "passes",
        "program",
        "replay",
        "adoption",
        "verified",
        "runtime",
        "tensor",
        "reports",
        "inner",
        "metrics",
        "_callers",
        "_config",
        "_errors",
        "_layout",
        "triangles",
    },
    "compiling": {"backend"},
    "files": set(),
    "identity": set(),
    "saved": {"_config", "_errors", "_layout"},
    "skeleton": {"runtime", "tensor", "_errors"},
    "persist": {"files", "identity", "runtime", "saved", "skeleton", "tensor", "_errors", "_layout"},
    "prefetch": {"runtime", "tensor", "_errors"},
    "tenancy": {"runtime", "_config", "_errors"},
    "hooks": set(),
    "patch": {"backend", "compiling", "hooks", "passes", "plain_reuse", "reports", "reuse", "_errors"},
    "monitor": {"_amounts", "runtime", "reports", "_config"},
    "metrics": {"monitor", "runtime", "_callers", "_config", "_errors"},
    "leaks": {"runtime", "_config", "_errors"},
    "timeline": {"_amounts", "runtime", "_errors"},
    "plot": {"_errors", "passes"},
    "explain": {"plot", "_errors", "_layout", "backend", "compiling", "passes", "patch", "reports"},
}
PUBLIC = {
    "__init__",
    "__main__",
    "_ab",
    "_doctor",
    "_top",
    "_tune",
    "compare",
    "testing",
}  # on top: may import everything
NEVER: dict[str, set[str]] = {
    "runtime/pool": {"torch", "triton"},
    "runtime/table": {"torch", "triton"},
    "kernels": {"torch.fx", "torch._dynamo", "torch._inductor", "sympy"},
    "passes": {"triton"},
    "": {"kernels", "passes"},  # the names of other people's distributions
}


def imports_of(source: str, module: str) -> Iterator[str]:
    """Absolute names of everything that `source` imports, as the module `a/b` of the package (`a` for `a/__init__`)."""
    parts = module.split("/")
    here = ["paged_inductor", *parts[:-1]]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            target = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            yield from (f"{target}.{alias.name}" for alias in node.names)


def faults(source: str, module: str) -> list[str]:
    """Imports of `source` that the architecture forbids to `module`, as sentences."""
    found = []
    part = module.split("/")[0]
    if part not in MAY_IMPORT and part not in PUBLIC:
        return [f"{part} has no place in the architecture: enter it in MAY_IMPORT"]
    for name in imports_of(source, module):
        names = name.split(".")
        if names[0] == "paged_inductor" and part not in PUBLIC:
            other = names[1] if len(names) > 1 else "__init__"
            if other != part and other not in MAY_IMPORT[part]:
                found.append(f"{module} imports {name}, but {part} may import only {sorted(MAY_IMPORT[part])}")
        for scope, banned in NEVER.items():
            if (module + "/").startswith(scope + "/" if scope else ""):
                found += [f"{module} imports {name}" for ban in banned if (name + ".").startswith(ban + ".")]
    return found


def modules() -> dict[str, Path]:
    """Every module of the package, as `runtime/pool`; the linked folders count as parts of it."""
    folders = [PACKAGE, *(path for path in PACKAGE.iterdir() if path.is_symlink())]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    return {str(file.relative_to(PACKAGE).with_suffix("")): file for file in files}


def test_the_linked_folders_are_seen() -> None:
    assert {"kernels/decode", "passes/rewrite", "runtime/pool", "backend"} <= modules().keys()


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_run_one_way(module: str) -> None:
    assert faults(modules()[module].read_text(), module) == []


def test_may_import_has_no_cycle() -> None:
    left = dict(MAY_IMPORT)
    while left:
        free = [part for part, others in left.items() if not others & left.keys()]
        assert free, f"a cycle among {sorted(left)}"
        for part in free:
            del left[part]


@pytest.mark.parametrize("folder", ["tests", "examples", "benchmarks", "kernels", "passes"])
def test_nobody_imports_the_folders_by_their_bare_names(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        names = {name.split(".")[0] for name in imports_of(file.read_text(), f"{folder}/x")}
        assert not names & {"kernels", "passes"}, f"{file.relative_to(ROOT)} must import paged_inductor.{folder}"


def test_the_kernels_import_by_their_bare_name_too() -> None:
    """Libraries of Hugging Face import `kernels` if there is one: this folder, where they run in a checkout."""
    for file in (ROOT / "kernels").rglob("*.py"):
        levels = {node.level for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)}
        assert levels <= {0, 1}, f"{file.name} imports from above the folder, before any of its functions is called"


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("passes/caches", "from ..runtime import manager"),
        ("passes/caches", "from ..tensor.handle import PagedTensor"),
        ("passes/caches", "def f():\n    from .. import runtime"),
        ("passes/caches", "import paged_inductor.runtime.pool"),
        ("passes/caches", "from paged_inductor import runtime"),
        ("ops/dispatch", "from ..passes import page_graph"),
        ("runtime/manager", "from ..ops import attention"),
        ("runtime/pool", "import torch"),
        ("runtime/pool", "from torch.utils import data"),
        ("runtime/table", "if True:\n    import triton.language as tl"),
        ("kernels/decode", "from torch import fx"),
        ("kernels/decode", "import torch.fx.node"),
        ("kernels/decode", "from .. import ops"),
        ("backend", "import kernels"),
        ("backend", "from passes import page_graph"),
        ("novelty", "import math"),
    ],
)
def test_the_check_can_fail(module: str, source: str) -> None:
    assert faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("passes/caches", "from .base import Pass\nfrom .. import ops\nimport torch.fx"),
        ("runtime/pool", "from collections.abc import Iterable"),
        ("runtime/group", "from .pool import BlockPool\nimport torch"),
        ("kernels/decode", "import torch\nimport triton\nfrom .launch import Launch"),
        ("backend", "from .passes import page_graph\nfrom .runtime import manager"),
    ],
)
def test_the_check_can_pass(module: str, source: str) -> None:
    assert faults(source, module) == []


# -- paths ---------------------------------------------------------------------------------------------------

MACHINE_PATH = re.compile(r"(?<![\w.}/-])/(?:home|root|Users|work|opt|mnt|tmp|srv|usr/local)/[\w.]")
TEXT = {".py", ".md", ".toml", ".txt", ".json", ".cfg", ".yml", ".yaml", ".sh", ""}
SKIPPED = {".git", ".venv", "build", "dist", "__pycache__"}


def texts() -> Iterator[Path]:
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part != ".ci" for part in parts[:-1])
        if path.is_file() and path.suffix in TEXT and not hidden and not SKIPPED & set(parts):
            yield path


def test_no_file_names_a_path_of_somebodys_machine() -> None:
    found = [str(path.relative_to(ROOT)) for path in texts() if MACHINE_PATH.search(path.read_text(errors="replace"))]
    assert found == []


def test_the_path_check_can_fail() -> None:
    assert MACHINE_PATH.search("see " + "/ho" + "me/ada/models")
    assert not MACHINE_PATH.search("#!/usr/bin/env bash, tests/tmp/x, https://example.org/opt/x")
