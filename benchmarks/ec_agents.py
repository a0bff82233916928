"""The two processes that `benchmarks.ec_transfer` moves encodings between, without engines."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch

from ec_connector.agent import Agent, link_to
from ec_connector.config import ECConfig, parse_config
from ec_connector.pool import Spec
from ec_connector.protocol import Drop, Pinned, ToScheduler, Want, WantedItem, encode
from ec_connector.slab import Slab
from ec_connector.transport.nixl import NixlAgent
from ec_connector.transport.reads import HOST_DEVICE, Region
from serving.plugin import register
from serving.protocol import EncodingRef

SIZES = {"16KiB": 16 << 10, "512KiB": 512 << 10, "4MiB": 4 << 20, "32MiB": 32 << 20}
WIDTH = 4096


def settings(host: str = "127.0.0.1", network: str = "127.0.0.0/8") -> ECConfig:
    """Of an agent that listens at `host` and reads from peers in `network`."""
    return parse_config(
        {"control_host": host, "secret_hex": "5e" * 32, "slab_bytes": 160 << 20, "peer_networks": [network]}
    )


def produce(pipe: Connection) -> None:
    """The other process: a region for bare READs; then saves and announces what is asked for."""
    buffer = np.ones(max(SIZES.values()), dtype=np.uint8)
    region = Region(buffer.ctypes.data, buffer.nbytes, HOST_DEVICE)
    register()
    bare = NixlAgent(f"bench-source-{os.getpid()}", region)
    pipe.send((msgspec.to_builtins(region), bare.metadata()))
    publish_items(pipe, settings())


def publish_items(pipe: Connection, config: ECConfig) -> None:
    """Save and announce the items that `pipe` asks for, for ever."""
    agent, slab = build_agent("producer", config)
    while True:
        names, size_bytes = pipe.recv()
        pipe.send([_publish(agent, slab, name, size_bytes) for name in names])


def _publish(agent: Agent, slab: Slab, name: str, size_bytes: int) -> tuple[dict[str, Any], float]:
    """The announcement, and the seconds from the finished tensor to it."""
    tensor = torch.full((max(size_bytes // (2 * WIDTH), 1), WIDTH), len(name), dtype=torch.bfloat16)
    started = time.perf_counter()
    spec = Spec(name, tensor.nbytes, (tensor.shape[0], WIDTH), "bfloat16")
    extent = agent.call(lambda core, _: core.reserve(spec))
    if extent is None:
        raise RuntimeError("the producer's slab is full of pins")
    digest = slab.write(extent.offset, tensor)
    agent.tell(lambda core, _: core.saved(extent, None, digest))
    announced = agent.tell(lambda core, now: core.announce(now, [name]))[name]
    elapsed = time.perf_counter() - started
    assert announced is not None
    return {key: value for key, value in announced.items() if key != "metadata"}, elapsed


class Fetcher:
    """A consumer's agent in this process, and its scheduler's link to it."""

    def __init__(self, config: ECConfig) -> None:
        self.agent, _ = build_agent("consumer", config)
        self._link = link_to(self.agent.identity.engine_id, 0, config.secret)

    def fetch(self, refs: Sequence[EncodingRef]) -> float:
        """Seconds until all of these items, which one request wishes for, lie in the slab, read and digested."""
        name = refs[0].identifier
        items = tuple(WantedItem(ref.identifier, ref.shape[0], ref=ref) for ref in refs)
        started = time.perf_counter()
        self._link.send(encode(Want(name, items)))
        self._await_pins(len(items))
        elapsed = time.perf_counter() - started
        self._link.send(encode(Drop(name)))
        return elapsed

    def _await_pins(self, missing: int) -> None:
        while missing:
            answers = self._link.receive(30.0)
            if not answers:
                raise RuntimeError("the agent did not answer")
            for payload in answers:
                answer = msgspec.msgpack.decode(payload, type=ToScheduler)
                if not isinstance(answer, Pinned):
                    raise RuntimeError(f"the transfer failed: {answer}")
                missing -= 1

    def close(self) -> None:
        self.agent.stop()
        self._link.close()


def build_agent(side: str, config: ECConfig) -> tuple[Agent, Slab]:
    """A started agent of this process, which is the transfer's `side`, and its slab."""
    register()  # as in vLLM's workers: NIXL's progress threads must not spin
    torch.set_num_threads(1)  # as in engines of one machine
    slab = Slab(config.slab_bytes, torch.device("cpu"))
    engine_id = f"bench-{side}-{os.getpid()}"
    agent = Agent(config, slab, engine_id=engine_id, rank=0, ranks=1, compatibility="bench", dtype="bfloat16")
    agent.start()
    return agent, slab
