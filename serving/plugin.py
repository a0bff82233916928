"""The vLLM plugin: remedies that must be in place inside every process vLLM starts.

vLLM loads the `vllm.general_plugins` entry points in the front end, in each EngineCore and in each
worker, before any of them builds a model. This file and `torch_companions.py` are the only ones that change other
libraries' behaviour; each remedy says what breaks without it and does nothing where it is not needed. `register` may
be called any number of times.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from serving import torch_companions

logger = logging.getLogger(__name__)

NIXL_PROGRESS_DELAY_FLOOR_US = 10_000
"""Least time between two wake-ups of NIXL's progress thread. At the Python default of 0 the thread spins on
a whole core for every agent; at 10 ms it costs 0.35 % of one (at 1 ms 2-3 %) and still wakes on events."""

_NIXL_API_MODULES = ("nixl_cu12._api", "nixl_cu13._api")


def register() -> None:
    """Apply every remedy this process needs. Called by vLLM through the entry point."""
    torch_companions.watch_imports()
    _request_amx_permission()
    _floor_nixl_progress_delay()


def _request_amx_permission() -> None:
    """Ask the kernel for AMX tile registers before the CPU attention kernel uses them.

    Without the request the first forward dies with SIGILL on processors that have AMX. Elsewhere the
    call answers False and changes nothing.
    """
    import torch

    init_amx = getattr(torch.cpu, "_init_amx", None)
    if init_amx is not None:
        init_amx()


def _floor_nixl_progress_delay() -> None:
    """Keep NIXL's progress thread from spinning on a core (vLLM's own agents included).

    The Python wrapper sets `pthrDelay = 0` and offers no argument for it. The only way in is the class that
    it instantiates: a subclass floors that one attribute. The wrapper is patched when it is imported, since
    importing NIXL costs seconds that an ingress need not pay.
    """
    for name in _NIXL_API_MODULES:
        if name in sys.modules:
            _floor_delay_in(sys.modules[name])
    if not any(isinstance(finder, _NixlFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _NixlFinder())


def _floor_delay_in(module: ModuleType) -> None:
    bindings: Any = module.nixlBind
    base: Any = bindings.nixlAgentConfig
    if getattr(base, "floors_progress_delay", False):
        return
    floor_us = NIXL_PROGRESS_DELAY_FLOOR_US

    class FlooredAgentConfig(base):  # type: ignore[misc]
        floors_progress_delay = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, max(value, floor_us) if name == "pthrDelay" else value)

    bindings.nixlAgentConfig = FlooredAgentConfig


class _NixlFinder(MetaPathFinder):
    """Floors the delay right after a NIXL wrapper module has been imported."""

    def __init__(self) -> None:
        self._busy = False

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if self._busy or fullname not in _NIXL_API_MODULES:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _floor_delay_in(module)
