"""Asynchronous federated learning for PyTorch, simulated under a virtual clock or over real sites.

The public names are listed in `__init__.pyi`, for type checkers and for this file. They are imported on first
use, so that a program that needs none of them, such as `offbeat --help`, starts without torch.
"""

import ast
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from offbeat.renamed import FormerModules

__version__ = version("offbeat")

_MODULES = {
    alias.name: str(node.module)
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}

__all__ = sorted(_MODULES)

sys.meta_path.append(FormerModules())


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'offbeat' has no attribute '{name}'")
    module = import_module(_MODULES[name])
    if not hasattr(module, name):  # the name is a module itself
        import_module(f"{_MODULES[name]}.{name}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
