"""The two processes that `benchmarks.ec_transfer` moves encodings between, without engines."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import torch

from ec_connector.agent import Agent
from ec_connector.config import parse_config
from ec_connector.pool import Spec
from ec_connector.slab import Slab
from ec_connector.transport.local import LocalClient, local_address
from ec_connector.transport.nixl import NixlAgent
from ec_connector.transport.reads import HOST_DEVICE, Region
from serving.plugin import register

SIZES = {"16KiB": 16 << 10, "512KiB": 512 << 10, "4MiB": 4 << 20, "32MiB": 32 << 20}
WIDTH = 4096
_SETTINGS = {"control_host": "127.0.0.1", "secret_hex": "5e" * 32, "slab_bytes": 160 << 20}


def produce(pipe: Connection) -> None:
    """The other process: save and announce what is asked for; and a region for bare READs."""
    agent, slab = build_agent("producer")
    buffer = np.ones(max(SIZES.values()), dtype=np.uint8)
    region = Region(buffer.ctypes.data, buffer.nbytes, HOST_DEVICE)
    bare = NixlAgent(f"bench-source-{os.getpid()}", region)
    pipe.send((msgspec.to_builtins(region), bare.metadata()))
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


def build_agent(side: str) -> tuple[Agent, Slab]:
    """A started agent of this process, which is the transfer's `side`, and its slab."""
    register()  # as in vLLM's workers: NIXL's progress threads must not spin
    config = parse_config(_SETTINGS)
    slab = Slab(config.slab_bytes, torch.device("cpu"))
    engine_id = f"bench-{side}-{os.getpid()}"
    agent = Agent(config, slab, engine_id=engine_id, rank=0, ranks=1, compatibility="bench", dtype="bfloat16")
    agent.start()
    return agent, slab


def link_to(agent: Agent) -> LocalClient:
    """What the scheduler of the agent's engine would use."""
    return LocalClient(local_address(agent.identity.engine_id, 0), parse_config(_SETTINGS).secret)
