"""A failure as a Python script that anyone can run."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .loops import Loop

__all__ = ["write_script"]

_SCRIPT = '''"""Reproduces a difference between a model run dense and the same model paged.

{reason}
"""

import sys

sys.path[:0] = {paths!r}

import torch

from paged_inductor.testing import {names}
{imports}
{model}
loop = Loop(
    prompts={prompts!r},
    operations=({operations}),
)
replay(model, loop, {arguments})
'''


def write_script(
    model: nn.Module, loop: Loop, call: Mapping[str, Any], reason: str, folder: str | None
) -> tuple[str, str]:
    """Save the model's weights and a script that replays `loop` on it; returns the script's path and text.

    call: keyword arguments of `replay`; functions among them are imported by the script if they can be. What cannot be
    saved or imported is left to fill in, with a comment that says so.
    """
    home = Path(folder or tempfile.mkdtemp(prefix="paged_inductor_fuzz_"))
    home.mkdir(parents=True, exist_ok=True)
    modules = {type(part).__module__ for part in model.modules()}
    imports, arguments = [], []
    for name, value in call.items():
        if callable(value):
            modules.add(value.__module__)
            imports.append(_import(name, value))
            arguments.append(f"{name}={name}")
        elif value is not None:
            arguments.append(f"{name}={value!r}")
    kinds = {type(operation).__name__ for operation in loop.operations}
    text = _SCRIPT.format(
        reason=reason.replace("\\", "\\\\").replace('"""', "'''"),
        paths=_paths(modules),
        names=", ".join(sorted(kinds | {"Loop", "replay"}, key=str.lower)),
        imports="".join(imports),
        model=_saved(model, modules, home),
        prompts=loop.prompts,
        operations="".join(f"\n        {operation!r}," for operation in loop.operations) + "\n    " * bool(kinds),
        arguments=", ".join(arguments),
    )
    path = home / "reproduce.py"
    path.write_text(text)
    return str(path), text


def _saved(model: nn.Module, modules: set[str], home: Path) -> str:
    """Code that makes the model again."""
    path = home / "model.pt"
    if "__main__" not in modules:
        try:
            torch.save(model, path)
            return f"model = torch.load({str(path)!r}, weights_only=False)"
        except Exception as error:  # classes defined in functions, open files, …: pickle raises many kinds
            why = f"could not be pickled ({type(error).__name__})"
    else:
        why = "is defined in a script"
    torch.save(model.state_dict(), path)
    return f"model = ...  # build the model here: it {why}\nmodel.load_state_dict(torch.load({str(path)!r}))"


def _import(name: str, function: Any) -> str:
    where, qualified = function.__module__, getattr(function, "__qualname__", "<")
    if where == "__main__" or "<" in qualified:
        return f"\n{name} = ...  # the function that was given to fuzz(): it cannot be imported\n"
    top, _, rest = qualified.partition(".")
    return f"\nfrom {where} import {top}\n\n{name} = {top}{'.' + rest if rest else ''}\n"


def _paths(modules: set[str]) -> list[str]:
    """The folders from which `modules` can be imported, apart from installed packages."""
    found = []
    for module in sorted(modules):
        file = getattr(sys.modules.get(module), "__file__", None)
        if file is None or "site-packages" in file or module == "__main__":
            continue
        depth = module.count(".") + (Path(file).name == "__init__.py")
        found.append(str(Path(file).resolve().parents[depth]))
    return sorted(set(found))
