"""Let torchvision's pure-Python half import beside a CPU-only torch.

PyPI's torchvision is a CUDA build. Its compiled ops do not load beside a CPU torch, and `import torchvision` then
fails while it registers fake kernels for ops that nobody declared. transformers' Qwen-VL processors need the import;
nothing here needs the ops.

vLLM imports transformers, and with it torchvision, before it loads plugins, also in the processes that it spawns.
So this runs at interpreter start, from `triptych_torchvision.pth` beside the installed packages: it must stay cheap
and import nothing heavy until torchvision is really imported.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OPS = ("nms", "qnms")
_kept: list[Any] = []  # torch.library.Library objects undo their definitions when collected


def declare_on_import() -> None:
    """Declare the missing ops just before the first import of torchvision. May be called any number of times."""
    installed = any(isinstance(finder, _Finder) for finder in sys.meta_path)
    if not installed and "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            _declare()
        return spec


def _declare() -> None:
    import torch

    missing = [op for op in _OPS if not hasattr(torch.ops.torchvision, op)]
    if torch.version.cuda is not None or not missing:
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")
    for op in missing:
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
