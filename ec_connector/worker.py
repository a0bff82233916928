"""The worker's side: engine tensors into the slab, views of the slab into the engine.

Also the extension of vLLM's worker class, which stage servers reach by `collective_rpc`. Everything here runs
on the worker's main thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.ec_transfer import get_ec_transfer

from ec_connector.agent import Agent
from ec_connector.core import Ready
from ec_connector.counters import counters
from ec_connector.pool import Spec
from ec_connector.scheduler import StepMetadata
from ec_connector.slab import Slab, dtype_name

if TYPE_CHECKING:
    from ec_connector.connector import TriptychECConnector


class ECWorker:
    """Moves items between vLLM's encoder cache and the slab.

    Args:
        agent: This worker's agent, started.
        slab: The agent's slab.
        saves: Whether this rank keeps a copy of what it encodes.
    """

    def __init__(self, agent: Agent, slab: Slab, *, saves: bool) -> None:
        self.agent = agent
        self._slab = slab
        self._saves = saves

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], metadata: StepMetadata) -> None:
        """Put this step's loads into vLLM's cache as views of the slab, and unpin what vLLM has evicted."""
        for _, identifier in metadata.loads:
            extent = self.agent.call(lambda core, _, i=identifier: core.locate(i))  # type: ignore[misc]
            encoder_cache[identifier] = self._slab.view(extent.offset, extent.shape, extent.dtype)
        if metadata.evicted:
            ready, evicted = self._device_event(), list(metadata.evicted)
            self.agent.tell(lambda core, _: core.evicted(evicted, ready))

    def start_save_caches(self, encoder_cache: dict[str, torch.Tensor], metadata: StepMetadata) -> None:
        """Save what vLLM still holds of this step's items and the slab has evicted; no encoder will run for them."""
        held = [identifier for identifier in metadata.publish if identifier in encoder_cache]
        if held and self._saves:
            for identifier in self.agent.call(lambda core, _: core.absent(held)):
                self.save(identifier, encoder_cache[identifier])

    def save(self, identifier: str, output: torch.Tensor) -> None:
        """Copy one encoder output, (rows, width), into the slab; skipped when it is there or all is pinned."""
        if not self._saves:
            return
        spec = Spec(identifier, output.nbytes, (output.shape[0], output.shape[1]), dtype_name(output))
        extent = self.agent.call(lambda core, _: core.reserve(spec))
        if extent is None:
            return
        digest = self._slab.write(extent.offset, output)
        ready = self._device_event()
        self.agent.tell(lambda core, _: core.saved(extent, ready, digest))

    def _device_event(self) -> Ready | None:
        """Tells when the device has done all that was queued so far; None where everything is synchronous."""
        if self._slab.device.type == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return cast(Ready, event.query)


class WorkerExtension:
    """Mixed into vLLM's worker: `await engine.collective_rpc("ec_announce", args=(identifiers,))`."""

    def ec_announce(self, identifiers: list[str]) -> dict[str, dict[str, Any] | None]:
        """Pin each held item for one announcement; the unsigned reference's fields and `metadata`, or None."""
        return _agent().tell(lambda core, now: core.announce(now, identifiers))

    def ec_release(self, leases: list[str]) -> int:
        """Drop announcement pins that nobody will read; returns how many were open."""
        return _agent().tell(lambda core, _: core.producer.release(leases))

    def ec_failures(self, request_ids: list[str] | None = None) -> dict[str, dict[str, Any]]:
        """Take the reasons of failed requests: `{request id: {"reason", "identifiers"}}`. None takes all."""
        return _agent().call(lambda core, _: core.failures.take(request_ids))

    def ec_stats(self) -> dict[str, float]:
        """Counters and gauges of this rank's agent."""
        return _agent().call(lambda core, _: counters(core))

    def ec_drop_views(self) -> None:
        """Forget all views, after vLLM's `reset_encoder_cache`."""
        _agent().tell(lambda core, _: core.evicted(None, None))


def _agent() -> Agent:
    connector = cast("TriptychECConnector", get_ec_transfer())
    return connector.worker.agent
