"""The IO thread of one worker: owner of the NIXL agent, the control sockets and the slab.

It sleeps in one poll over all sockets, until a peer, the scheduler or the worker wants something or a deadline
passes. Only while a read is under way that has not completed at once does it look again every 50 us, which is
what a slow lane needs without burning the core that the engine computes on.

The state is under a lock, and so is NIXL. The engine's thread saves and looks up without waking the IO thread, and
where the scheduler lives in the worker's process it also begins small reads itself (`DirectLink`): on one machine
they are over before another thread would have woken. Sockets belong to the IO thread alone.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from ec_connector.config import ECConfig
from ec_connector.core import Core, Identity, control_address
from ec_connector.lanes import Here
from ec_connector.protocol import (
    Done,
    PeerMessage,
    PeerReply,
    Refused,
    ToAgent,
    ToScheduler,
    encode,
)
from ec_connector.slab import Slab
from ec_connector.transport.local import LocalClient, LocalServer, local_address
from ec_connector.transport.nixl import NixlAgent
from ec_connector.transport.zmq import ConnectionLost, Event, Hub, Received, ReceivedLocally

logger = logging.getLogger(__name__)

_PEERS = "peers"
_MOVING_SLEEP_S = 50e-6
"""Between two looks at reads under way: NIXL has nothing to wait on, and `poll` counts whole milliseconds."""
_STOP_WAIT_S = 30.0
_DIRECT_BYTES = 4 << 20
"""Reads of up to as many bytes begin on the scheduler's thread: they take about as long as a step of a small engine."""
_PATIENCE_S = 500e-6
_PATIENCE_BYTES_PER_S = 2e9
"""How long the scheduler's thread sees reads through that it has begun: so long, and as long again as the bytes take at
half the pace of memory. The request would wait for the next step otherwise: a millisecond where nothing else runs, and
where something does as long as that takes."""

Result = TypeVar("Result")


class _Network:
    """Control connections as the state machines see them. What they ask for is done by the IO thread."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._undone: list[Callable[[], None]] = []
        self.is_urgent = False
        """Whether something is to be done that a request waits for. Nothing waits for a DONE."""

    @property
    def is_idle(self) -> bool:
        return not self._undone

    def connect(self, address: str) -> None:
        self._do(lambda: self._hub.connect(address))

    def disconnect(self, address: str) -> None:
        self._do(lambda: self._hub.disconnect(address))

    def send(self, address: str, message: PeerMessage) -> None:
        self._do(lambda: self._hub.send(address, encode(message)), urgently=not isinstance(message, Done))

    def take(self) -> list[Callable[[], None]]:
        """What is to be done, in order."""
        undone, self._undone, self.is_urgent = self._undone, [], False
        return undone

    def _do(self, action: Callable[[], None], *, urgently: bool = True) -> None:
        self._undone.append(action)
        self.is_urgent |= urgently


class Agent:
    """Runs a `Core` on a thread of its own.

    Args:
        config: The operator's settings.
        slab: The memory; nothing else may write to it except into extents from `Core.reserve`.
        engine_id: vLLM's id of the engine, shared with its scheduler.
        rank: This worker among `ranks` of the engine.
        ranks: Workers of the engine.
        compatibility: `compatibility_hash` of the model.
        dtype: Element type of encoder outputs.

    Raises:
        OSError: The control address cannot be bound.
    """

    def __init__(
        self,
        config: ECConfig,
        slab: Slab,
        *,
        engine_id: str,
        rank: int,
        ranks: int,
        compatibility: str,
        dtype: str,
    ) -> None:
        self._slab = slab
        # A device's slab is digested by waiting for the device, which the engine's thread must not do.
        self._direct_bytes = _DIRECT_BYTES if slab.device.type == "cpu" else 0
        self._hub = Hub(config.secret)
        port = config.control_port + rank if config.control_port else 0
        bound = self._hub.serve(_PEERS, control_address(config.control_host, port))
        self._local_address = local_address(engine_id, rank)
        self._local = LocalServer(self._local_address, config.secret)
        self._hub.adopt(self._local)
        peer = control_address(config.control_host, urlsplit(bound).port or 0)
        self.identity = Identity(engine_id, rank, ranks, peer, uuid.uuid4().hex, compatibility, dtype)
        self._nixl = NixlAgent(f"ec-{self.identity.epoch}", slab.region)
        self._network = _Network(self._hub)
        self._core = Core(
            self.identity,
            config,
            slab,
            nixl_metadata=self._nixl.metadata(),
            reader=self._nixl,
            network=self._network,
            here=Here.observe(),
            clock=time.monotonic,
        )
        self._state = threading.Lock()
        self._sleeps_until: float | None = None
        self._scheduler: int | None = None
        self._inbox: deque[bytes] = deque()
        self._direct: DirectLink | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ec-agent", daemon=True)

    def start(self) -> None:
        self._thread.start()
        _running[self._local_address] = self
        logger.info("EC agent %s listens at %s", self.identity.epoch, self.identity.peer)

    def stop(self) -> None:
        """Close the sockets and end the thread. The slab stays mapped: a peer may still be reading it."""
        if self._thread.is_alive():
            _running.pop(self._local_address, None)
            self._stopping = True
            self._hub.wake()
            self._thread.join(_STOP_WAIT_S)

    def call(self, function: Callable[[Core, float], Result]) -> Result:
        """`function(core, now)`, for other threads. It must neither read from peers nor send to them."""
        with self._state:
            return function(self._core, time.monotonic())

    def tell(self, function: Callable[[Core, float], Result]) -> Result:
        """As `call`, where the change may give the IO thread something to do, or a deadline to keep."""
        with self._state:
            now = time.monotonic()
            result = function(self._core, now)
            has_work = self._has_work(now)
        if has_work:
            self._hub.wake()
        return result

    def link(self) -> DirectLink:
        """The link of a scheduler in this process. There is one scheduler, and answers go to it from here on."""
        self._direct = DirectLink(self)
        return self._direct

    def take_directly(self, payload: bytes) -> None:
        """Act on a message of the scheduler, on its thread if the IO thread is not at work."""
        self._inbox.append(payload)
        if not self._state.acquire(blocking=False):
            self._hub.wake()
            return
        try:
            now = time.monotonic()
            self._take_inbox(now)
            unread_bytes = self._core.unread_bytes
            if self._core.waiting and unread_bytes <= self._direct_bytes:
                self._tell_scheduler(self._core.advance(now))
                self._see_through(now + _PATIENCE_S + unread_bytes / _PATIENCE_BYTES_PER_S)
            has_work = self._has_work(now)
        finally:
            self._state.release()
        if has_work:
            self._hub.wake()

    def _see_through(self, deadline: float) -> None:
        """Look at reads under way until they have ended, or until the deadline."""
        while self._core.fetches.moving and (now := time.monotonic()) < deadline:
            self._tell_scheduler(self._core.advance(now))

    def finish_directly(self) -> None:
        """Have done what was put off while the scheduler waited for its answer."""
        if not self._network.is_idle:
            self._hub.wake()

    def _has_work(self, now: float) -> bool:
        """Whether the IO thread must not sleep as long as it meant to."""
        if self._core.waiting or self._network.is_urgent:
            return True
        wake_at = self._core.wake_at(now)
        return wake_at is not None and (self._sleeps_until is None or wake_at < self._sleeps_until)

    def _run(self) -> None:
        try:
            self._slab.adopt_thread()
            while not self._stopping:
                self._turn()
            self._hub.close()
        except BaseException:
            # Without this thread every gated request would wait for ever. vLLM notices a dead worker.
            logger.critical("the EC agent's IO thread failed", exc_info=True)
            os._exit(1)

    def _turn(self) -> None:
        """One round: wait, take messages, advance, answer."""
        events = self._wait()
        with self._state:
            for event in events:
                self._take(event)
            now = time.monotonic()
            self._take_inbox(now)
            to_scheduler, to_peers = self._core.poll(now)
            self._tell_scheduler(to_scheduler)
            undone = self._network.take()
        for action in undone:
            action()
        for sender, reply in to_peers:
            self._hub.reply(_PEERS, sender, encode(reply))

    def _wait(self) -> list[Event]:
        with self._state:
            now = time.monotonic()
            wake_at = self._core.wake_at(now)
            self._sleeps_until = wake_at
            moving = self._core.moving
        if moving:
            time.sleep(_MOVING_SLEEP_S)
        return self._hub.poll(None if wake_at is None else max(0.0, wake_at - now))

    def _take_inbox(self, now: float) -> None:
        while self._inbox:
            self._take_local(now, self._inbox.popleft())

    def _take_local(self, now: float, payload: bytes) -> None:
        answer = self._core.on_local(now, msgspec.msgpack.decode(payload, type=ToAgent))
        if answer is not None:
            self._tell_scheduler([answer])

    def _tell_scheduler(self, messages: list[ToScheduler]) -> None:
        for message in messages:
            if self._direct is not None:
                self._direct.answer(encode(message))
            else:
                assert self._scheduler is not None
                self._local.reply(self._scheduler, encode(message))

    def _take(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case ConnectionLost():
                self._core.fetches.on_lost(now, event.address)
            case ReceivedLocally():
                self._scheduler = event.sender
                self._take_local(now, event.payload)
            case Received() if event.origin == _PEERS:
                reply = self._answer(now, event)
                if reply is not None:
                    self._hub.reply(_PEERS, event.sender, encode(reply))
            case Received():
                self._take_reply(now, event)

    def _answer(self, now: float, event: Received) -> PeerReply | None:
        try:
            message = msgspec.msgpack.decode(event.payload, type=PeerMessage)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            logger.warning("unreadable message from an EC peer: %s", error)
            return Refused("unreadable message")
        return self._core.on_peer(now, event.sender, message)

    def _take_reply(self, now: float, event: Received) -> None:
        try:
            reply = msgspec.msgpack.decode(event.payload, type=PeerReply)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            logger.warning("unreadable reply from EC peer %s: %s", event.origin, error)
            reply = Refused("unreadable reply")
        self._core.fetches.on_reply(now, event.origin, reply)


class DirectLink:
    """A scheduler's link to the agent of its own process. Used by the scheduler's thread alone.

    A message that is answered at once wakes no other thread: the woken thread would take Python's lock just when the
    scheduler wants to go on. What can be put off is, until a message that has no answer (each request ends with one)
    or until `receive` finds nothing.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def send(self, payload: bytes) -> None:
        before = self._answers.qsize()
        self._agent.take_directly(payload)
        if self._answers.qsize() == before:
            self._agent.finish_directly()

    def receive(self, timeout_s: float = 0.0) -> list[bytes]:
        """All answers that are there, waiting for up to `timeout_s` for the first."""
        answers: list[bytes] = []
        try:
            answers.append(self._answers.get(timeout=timeout_s) if timeout_s else self._answers.get_nowait())
            while True:
                answers.append(self._answers.get_nowait())
        except queue.Empty:
            pass
        if not answers:
            self._agent.finish_directly()
        return answers

    def answer(self, payload: bytes) -> None:
        """Called by the agent."""
        self._answers.put(payload)

    def close(self) -> None:
        """Nothing is held."""


_running: dict[str, Agent] = {}
"""The agents of this process, by local address."""


def link_to(engine_id: str, rank: int, secret: bytes) -> DirectLink | LocalClient:
    """A scheduler's link to the agent of one rank of its engine, which listens already.

    Raises:
        OSError: Nobody listens there.
    """
    address = local_address(engine_id, rank)
    agent = _running.get(address)
    return agent.link() if agent is not None else LocalClient(address, secret)
