"""vLLM's own EC connectors, without engines.

`Files` is ECExampleConnector. `Sessions` is the NIXL path of ECCPUConnector: both sessions, which advance only when
the scheduler calls them, once a step, on both sides. Stood in for here: the engines' schedulers, which would call the
same methods. Left out: saving into its region, and loading from it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import socket
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.cpu.control.zmq import ZmqClientTransport, ZmqServerTransport
from vllm.distributed.ec_transfer.ec_connector.cpu.data.nixl import NixlDataTransport
from vllm.distributed.ec_transfer.ec_connector.cpu.ec_shared_region import ECSharedRegion
from vllm.distributed.ec_transfer.ec_connector.cpu.scheduler.embedding_cache import EmbeddingCache
from vllm.distributed.ec_transfer.ec_connector.cpu.session import ConsumerSession, ProducerSession
from vllm.distributed.ec_transfer.ec_connector.example_connector import (
    ECExampleConnector,
    ECExampleConnectorMetadata,
    MMMeta,
)

_BLOCK_BYTES = 8 << 10
_REGION_BYTES = 64 << 20
_BLOCKS = _REGION_BYTES // _BLOCK_BYTES
_TIMEOUT_S = 60.0


class Files:
    """One safetensors file an item, under `folder`, saved and loaded by the connector's own methods.

    A loaded tensor is only a mapping of the file until it is read; the copy does what the engine's next step would.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        transfer = SimpleNamespace(
            is_ec_producer=True, is_ec_consumer=True, get_from_extra_config=lambda name, default: str(folder)
        )
        self._connector = ECExampleConnector(
            SimpleNamespace(ec_transfer_config=transfer, model_config=None), ECConnectorRole.WORKER
        )

    def __call__(self, name: str, size_bytes: int) -> float:
        """Seconds from the finished tensor to a loaded copy."""
        saved = {name: torch.ones(*_extent(size_bytes)[1], dtype=torch.bfloat16)}
        loaded: dict[str, torch.Tensor] = {}
        wish = ECExampleConnectorMetadata()
        wish.add_mm_data(MMMeta.make_meta(name, saved[name].shape[0]))
        started = time.perf_counter()
        self._connector.save_caches(saved, name)
        self._connector.bind_connector_metadata(wish)
        self._connector.start_load_caches(loaded)
        loaded[name].clone()
        elapsed = time.perf_counter() - started
        shutil.rmtree(self._folder / name)
        return elapsed


class Sessions:
    """A consumer session in this process, a producer session in another, both stepping every `step_s` seconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = ("127.0.0.1", probe.getsockname()[1])
        processes = multiprocessing.get_context("forkserver")
        self._pipe, theirs = processes.Pipe()
        self._producer = processes.Process(target=_produce, args=(theirs, self._address, step_s), daemon=True)
        self._producer.start()
        theirs.close()
        self._pipe.recv()
        self._region, self._cache, data = _storage(f"bench-ec-consumer-{step_s}-{os.getpid()}")
        self._transport = ZmqClientTransport()
        self._session = ConsumerSession(
            addr=self._address,
            zmq_conn=self._transport.connect(self._address),
            transport=self._transport,
            data=data,
            compat_hash="bench",
        )

    def __call__(self, name: str, size_bytes: int) -> float:
        """Seconds from the wish to the step that sees the item complete."""
        self._pipe.send((name, size_bytes))
        self._pipe.recv()
        entry = self._cache.alloc(name, *_extent(size_bytes))
        started = time.perf_counter()
        self._session.start_xfer(name, list(entry.block_ids), time.monotonic() + _TIMEOUT_S)
        while True:
            time.sleep(self._step_s)  # the engine's step; nothing of the connector runs meanwhile
            messages = self._transport.poll()
            self._session.poll(messages.get(self._address, []), time.monotonic())
            results = self._session.take_results()
            if name in results.completed:
                break
            if results.tombstoned or time.perf_counter() - started > _TIMEOUT_S:
                raise RuntimeError(f"the transfer failed: {results}")
        elapsed = time.perf_counter() - started
        self._pipe.send("rest")
        self._cache.discard(name)
        return elapsed

    def close(self) -> None:
        self._pipe.send(None)
        self._producer.join(10)
        self._producer.kill()
        self._session.close()
        self._transport.close()


def _produce(pipe: Connection, address: tuple[str, int], step_s: float) -> None:
    region, cache, data = _storage(f"bench-ec-producer-{step_s}-{os.getpid()}")
    transport = ZmqServerTransport(*address)
    session = ProducerSession(transport=transport, data=data, cache=cache, compat_hash="bench")
    pipe.send("ready")
    while (wish := pipe.recv()) is not None:
        name, size_bytes = wish
        entry = cache.alloc(name, *_extent(size_bytes))  # evicts earlier ones
        region.blocks[list(entry.block_ids)] = 1
        cache.mark_ready(name)
        pipe.send("published")
        while not pipe.poll(step_s):  # steps only in its turn, so as not to disturb what is measured beside it
            session.poll_step()
        pipe.recv()
    session.close()


def _storage(name: str) -> tuple[Any, Any, Any]:
    """(region, cache, data transport) of one side. The region's file goes at once: this process may be killed."""
    region = ECSharedRegion(engine_id=name, num_blocks=_BLOCKS, block_size_bytes=_BLOCK_BYTES)
    Path(f"/dev/shm/vllm_ec_{name}.mmap").unlink()
    data = NixlDataTransport(name, region.blocks.data_ptr(), _BLOCKS, _BLOCK_BYTES, _REGION_BYTES)
    return region, EmbeddingCache(_BLOCKS), data


def _extent(size_bytes: int) -> tuple[int, tuple[int, int]]:
    """(blocks, shape) of an item of bfloat16 rows, one block each."""
    blocks = size_bytes // _BLOCK_BYTES
    return blocks, (blocks, _BLOCK_BYTES // 2)
