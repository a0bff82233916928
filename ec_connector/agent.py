"""The IO thread of one worker: owner of the NIXL agent, the control sockets and the slab.

It sleeps in one poll over all sockets, until a peer, the scheduler or the worker wants something or a deadline
passes. Only while a read is under way that has not completed at once does it look again every 50 us, which is
what a slow lane needs without burning the core that the engine computes on.

The state is under a lock, so that the engine's thread can save and look up without waking this one; sockets and
NIXL belong to the IO thread alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from ec_connector.config import ECConfig
from ec_connector.core import Core, Identity, control_address
from ec_connector.lanes import Here
from ec_connector.protocol import (
    PeerMessage,
    PeerReply,
    Refused,
    ToAgent,
    encode,
)
from ec_connector.slab import Slab
from ec_connector.transport.local import LocalServer, local_address
from ec_connector.transport.nixl import NixlAgent
from ec_connector.transport.zmq import ConnectionLost, Event, Hub, Received, ReceivedLocally

logger = logging.getLogger(__name__)

_PEERS = "peers"
_MOVING_SLEEP_S = 50e-6
"""Between two looks at reads under way: NIXL has nothing to wait on, and `poll` counts whole milliseconds."""
_STOP_WAIT_S = 30.0

Result = TypeVar("Result")


class _Network:
    """Control connections as the state machines see them. Messages leave with `flush`, after the scheduler's."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._unsent: list[tuple[str, PeerMessage]] = []

    def connect(self, address: str) -> None:
        self._hub.connect(address)

    def disconnect(self, address: str) -> None:
        self.flush()
        self._hub.disconnect(address)

    def send(self, address: str, message: PeerMessage) -> None:
        self._unsent.append((address, message))

    def flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        for address, message in unsent:
            self._hub.send(address, encode(message))


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
        self._hub = Hub(config.secret)
        port = config.control_port + rank if config.control_port else 0
        bound = self._hub.serve(_PEERS, control_address(config.control_host, port))
        self._local = LocalServer(local_address(engine_id, rank), config.secret)
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
        self._scheduler: int | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="ec-agent", daemon=True)

    def start(self) -> None:
        self._thread.start()
        logger.info("EC agent %s listens at %s", self.identity.epoch, self.identity.peer)

    def stop(self) -> None:
        """Close the sockets and end the thread. The slab stays mapped: a peer may still be reading it."""
        if self._thread.is_alive():
            self._stopping = True
            self._hub.wake()
            self._thread.join(_STOP_WAIT_S)

    def call(self, function: Callable[[Core, float], Result]) -> Result:
        """`function(core, now)`, for other threads. It must neither read from peers nor send to them."""
        with self._state:
            return function(self._core, time.monotonic())

    def tell(self, function: Callable[[Core, float], Result]) -> Result:
        """As `call`, where the change gives the IO thread something to do, or a deadline to keep."""
        result = self.call(function)
        self._hub.wake()
        return result

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
            to_scheduler, to_peers = self._core.poll(time.monotonic())
        for message in to_scheduler:
            assert self._scheduler is not None
            self._local.reply(self._scheduler, encode(message))
        self._network.flush()
        for sender, reply in to_peers:
            self._hub.reply(_PEERS, sender, encode(reply))

    def _wait(self) -> list[Event]:
        with self._state:
            now = time.monotonic()
            wake_at = self._core.wake_at(now)
            moving = self._core.moving
        if moving:
            time.sleep(_MOVING_SLEEP_S)
        return self._hub.poll(None if wake_at is None else max(0.0, wake_at - now))

    def _take(self, event: Event) -> None:
        now = time.monotonic()
        match event:
            case ConnectionLost():
                self._core.fetches.on_lost(now, event.address)
            case ReceivedLocally():
                self._scheduler = event.sender
                answer = self._core.on_local(now, msgspec.msgpack.decode(event.payload, type=ToAgent))
                if answer is not None:
                    self._local.reply(event.sender, encode(answer))
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
