"""An EC agent in a process of its own, to be killed, stopped and restarted; and one in this process to read from it.

There is no engine: items are filled with bytes that follow from a seed, and saved, announced and asked for as a
worker and a scheduler would. Processes are forked from a server that has imported everything, which saves the
seconds that torch and NIXL take to import.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch

from ec_connector.agent import Agent, link_to
from ec_connector.config import ECConfig, parse_config
from ec_connector.counters import counters
from ec_connector.pool import Spec
from ec_connector.protocol import Drop, Fail, Missing, Pinned, ToAgent, ToScheduler, Want, WantedItem, encode
from ec_connector.slab import Slab
from ec_connector.transport.local import LocalClient, local_address
from serving.plugin import register
from serving.protocol import EncodingRef

WIDTH = 64
MODEL = "a model"


def build(config: ECConfig, model: str = MODEL) -> tuple[Agent, Slab]:
    """A started agent of a one-rank engine with a fresh id."""
    register()  # as vLLM does in its workers: NIXL's progress threads must not spin
    slab = Slab(config.slab_bytes, torch.device("cpu"))
    agent = Agent(config, slab, engine_id=uuid.uuid4().hex, rank=0, ranks=1, compatibility=model, dtype="bfloat16")
    agent.start()
    return agent, slab


def content(seed: int, size_bytes: int) -> torch.Tensor:
    """(rows, WIDTH) of bfloat16 that only this seed gives."""
    row = torch.arange(WIDTH, dtype=torch.float32).to(torch.bfloat16) + seed
    return row.repeat(size_bytes // (2 * WIDTH), 1)


def put(agent: Agent, slab: Slab, identifier: str, tensor: torch.Tensor) -> bool:
    """Save an item as a worker does; whether there was room."""
    spec = Spec(identifier, tensor.nbytes, (tensor.shape[0], tensor.shape[1]), "bfloat16")
    extent = agent.call(lambda core, _: core.reserve(spec))
    if extent is not None:
        digest = slab.write(extent.offset, tensor)
        agent.tell(lambda core, _: core.saved(extent, None, digest))
    return extent is not None


class Holdings(msgspec.Struct, frozen=True):
    """Files and named sockets of a process that could outlive it."""

    files: list[str]
    sockets: list[str]

    @classmethod
    def of(cls, pid: int) -> Holdings:
        links = [os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
        mapped = {line.split(maxsplit=5)[5].strip() for line in _lines(f"/proc/{pid}/maps") if line.count("/")}
        files = [name for name in {*links, *mapped} if name.startswith(("/dev/shm/", "/tmp/"))]
        inodes = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
        sockets = [fields[7] for fields in _unix_sockets() if fields[6] in inodes]
        return cls(files, sockets)

    def remaining(self) -> list[str]:
        """What is still there."""
        bound = {fields[7] for fields in _unix_sockets()}
        return [name for name in self.files if Path(name).exists()] + [name for name in self.sockets if name in bound]


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _unix_sockets() -> list[list[str]]:
    """Fields of every Unix socket that has a name: the seventh is the inode, the eighth the name."""
    return [fields for fields in (line.split() for line in _lines("/proc/net/unix")[1:]) if len(fields) > 7]


def _becomes_idle(stats: Callable[[], dict[str, Any]], wait_s: float) -> bool:
    """Whether all pins, fills, quarantines and leases come back to zero in time."""
    deadline = time.monotonic() + wait_s
    while any(stats()[key] for key in ("pinned", "filling", "quarantined", "open_pins", "open_leases")):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.02)  # counters change in the agent's thread, which tells nobody
    return True


class Consumer:
    """An agent in this process, and the scheduler's link to it."""

    is_direct = True
    """Whether the link is that of a scheduler in the agent's process, or one over the socket, as with several ranks."""

    def __init__(self, extra: Mapping[str, Any], model: str = MODEL) -> None:
        config = parse_config(extra)
        self.agent, self.slab = build(config, model)
        engine = (self.agent.identity.engine_id, 0)
        self._link = (
            link_to(*engine, config.secret) if self.is_direct else LocalClient(local_address(*engine), config.secret)
        )
        self.count = 0

    def want(self, *items: WantedItem, wait_s: float = 30.0) -> dict[str, Pinned | Missing]:
        """Ask for items as one request; the answers by identifier, as soon as each has one or one is missing."""
        self.count += 1
        self.tell(Want(f"r{self.count}", items))
        answers: dict[str, Pinned | Missing] = {}
        deadline = time.monotonic() + wait_s
        while len(answers) < len(items) and not any(isinstance(a, Missing) for a in answers.values()):
            assert time.monotonic() < deadline, f"no answer for {items}"
            for payload in self._link.receive(0.05):
                message = msgspec.msgpack.decode(payload, type=ToScheduler)
                if isinstance(message, Pinned | Missing):
                    answers[message.identifier] = message
        return answers

    def fetch(self, ref: EncodingRef) -> Pinned | Missing:
        """Ask for one item, as `want`."""
        return self.want(WantedItem(ref.identifier, ref.shape[0], ref=ref))[ref.identifier]

    def drop(self) -> None:
        """End the last request."""
        self.tell(Drop(f"r{self.count}"))

    def tell(self, message: ToAgent | Fail) -> None:
        self._link.send(encode(message))

    def bytes_of(self, identifier: str) -> torch.Tensor:
        extent = self.agent.call(lambda core, _: core.locate(identifier))
        return self.slab.view(extent.offset, extent.shape, extent.dtype)

    def stats(self) -> dict[str, Any]:
        return self.agent.call(lambda core, _: counters(core))

    def idle(self, wait_s: float = 10.0) -> bool:
        """Whether all pins, fills, quarantines and leases come back to zero in time."""
        return _becomes_idle(self.stats, wait_s)

    def close(self) -> None:
        self.agent.stop()
        self._link.close()


class Peer:
    """The other process. `env` are variables for it alone."""

    def __init__(self, extra: Mapping[str, Any], env: Mapping[str, str], model: str = MODEL) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_serve, args=(dict(extra), dict(env), model, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.port: int = self._pipe.recv()

    def put(self, identifier: str, seed: int, size_bytes: int) -> EncodingRef:
        """Save and announce an item."""
        return msgspec.convert(self.ask("put", identifier, seed, size_bytes), EncodingRef)

    def put_rows(self, identifier: str, rows: torch.Tensor) -> EncodingRef:
        """Save and announce (rows, width) of bfloat16."""
        raw = rows.contiguous().view(torch.uint8).numpy().tobytes()
        return msgspec.convert(self.ask("rows", identifier, raw, tuple(rows.shape)), EncodingRef)

    def stats(self) -> dict[str, Any]:
        return dict(self.ask("stats"))

    def idle(self, wait_s: float = 5.0) -> bool:
        """As `Consumer.idle`."""
        return _becomes_idle(self.stats, wait_s)

    def holdings(self) -> Holdings:
        assert self._process.pid is not None
        return Holdings.of(self._process.pid)

    def ask(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.join()
        while number == signal.SIGSTOP and not self._is_stopped():
            time.sleep(0.001)  # each thread stops when it is scheduled next

    def _is_stopped(self) -> bool:
        tasks = Path(f"/proc/{self._process.pid}/task").iterdir()
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)

    def close(self) -> None:
        if self._process.is_alive():
            self._process.kill()
        self._process.join()
        self._pipe.close()


_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.fault.ec_peer"])


def _serve(extra: dict[str, Any], env: dict[str, str], model: str, pipe: Connection) -> None:
    os.environ.update(env)
    agent, slab = build(parse_config(extra), model)
    pipe.send(int(agent.identity.peer.rpartition(":")[2]))
    while True:
        pipe.send(_obey(agent, slab, pipe.recv()))


def _obey(agent: Agent, slab: Slab, command: tuple[Any, ...]) -> Any:
    match command:
        case ("put", identifier, seed, size_bytes):
            put(agent, slab, identifier, content(seed, size_bytes))
            return _announce(agent, identifier)
        case ("rows", identifier, raw, shape):
            rows = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(shape)
            put(agent, slab, identifier, rows)
            return _announce(agent, identifier)
        case ("release", *leases):
            return agent.tell(lambda core, _: core.producer.release(leases))
        case ("stats",):
            return agent.call(lambda core, _: counters(core))
        case _:
            raise ValueError(f"unknown command {command}")


def _announce(agent: Agent, identifier: str) -> dict[str, Any]:
    announced = agent.tell(lambda core, now: core.announce(now, [identifier]))[identifier]
    return {k: v for k, v in (announced or {}).items() if k != "metadata"}
