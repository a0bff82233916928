"""Keep torchvision, torchaudio and torchcodec from failing beside a CPU-only torch.

PyPI's builds of them are CUDA builds. Beside a CPU torch, `import torchvision` fails while it registers fake kernels
for compiled ops that nobody declared; the other two fail on a missing CUDA library, with an OSError that neither
transformers nor vLLM expects of a package that is installed. The Qwen-VL processors need torchvision, though none of
its compiled ops; nothing here needs the other two.

vLLM imports transformers before it loads plugins, also in the processes that it spawns. So this runs at interpreter
start, from `triptych_torch_companions.pth` beside the installed packages: it must stay cheap and import nothing heavy
until one of those packages is really imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_OPS = ("nms", "qnms")
_OPTIONAL = ("torchaudio", "torchcodec")
_kept: list[Any] = []  # torch.library.Library objects undo their definitions when collected


def watch_imports() -> None:
    """Apply each remedy just before the import that needs it. May be called any number of times."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self._remedies = {"torchvision": _declare_ops, "transformers": _hide_unloadable, "vllm": _hide_unloadable}

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        remedy = self._remedies.pop(fullname, None)
        if remedy is not None and importlib.util.find_spec(fullname) is not None:
            import torch

            if torch.version.cuda is None:
                remedy()
        return None  # the ordinary finders take over


def _declare_ops() -> None:
    import torch

    missing = [op for op in _OPS if not hasattr(torch.ops.torchvision, op)]
    if not missing:
        return
    library: Any = torch.library.Library("torchvision", "FRAGMENT")
    for op in missing:
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _hide_unloadable() -> None:
    """Make packages that cannot load look as if they were not installed, which is what importers ask first."""
    for package in _OPTIONAL:
        if package in sys.modules or importlib.util.find_spec(package) is None:
            continue
        try:
            importlib.import_module(package)
        except (OSError, RuntimeError):
            for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
                del sys.modules[name]
            sys.modules[package] = None  # type: ignore[assignment]  # the documented way to make an import fail
