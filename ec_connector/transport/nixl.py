"""NIXL, as far as the connector needs it: one registered region, READs of it by peers, READs of theirs.

This is the only module that imports nixl. Its exceptions and state strings end here and become `ReadState`.
One thread owns an instance; NIXL's wrapper is not safe to share.
"""

from __future__ import annotations

from nixl import _bindings as bindings
from nixl._api import nixl_agent, nixl_agent_config

from ec_connector.transport.reads import PeerUnusable, Read, ReadState, Region

_PEER_ERRORS: tuple[type[Exception], ...] = (
    bindings.nixlRemoteDisconnectError,
    bindings.nixlBackendError,
    bindings.nixlNotFoundError,
    bindings.nixlInvalidParamError,
    bindings.nixlMismatchError,
    bindings.nixlCancelledError,
    bindings.nixlNotAllowedError,
    bindings.nixlUnknownError,
)


class NixlAgent:
    """A NIXL agent with one region registered for its whole life.

    The region is never deregistered or unmapped: a peer that reads unmapped memory over TCP kills this process.

    Args:
        name: Unique among all agents that may ever meet, also after a restart.
        region: The slab.
    """

    def __init__(self, name: str, region: Region) -> None:
        self.name = name
        self._region = region
        self._agent = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
        whole = (region.address, region.size_bytes, max(region.device, 0), "")
        self._registration = self._agent.register_memory([whole], region.segment)

    def metadata(self) -> bytes:
        """What a peer needs to read the region. Grants all of it."""
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata and return its agent's name.

        Raises:
            PeerUnusable: The metadata does not load.
        """
        try:
            name = self._agent.add_remote_agent(metadata)
        except _PEER_ERRORS as error:
            raise PeerUnusable(str(error)) from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def drop_peer(self, name: str) -> None:
        """Forget a peer. Its memory cannot be read afterwards."""
        try:
            self._agent.remove_remote_agent(name)
        except _PEER_ERRORS:
            return  # already unknown, which is what was wanted

    def read(self, peer: str, source: Region, source_offset: int, offset: int, size_bytes: int) -> Read:
        """Start copying from a peer's region to `offset` of ours.

        On one machine the copy happens inside this call, without the peer's help. No notification is attached:
        its delivery would need the peer's help, and a peer that stalls would hold up a copy that is complete.
        """
        local = self._agent.get_xfer_descs([self._region.descriptor(offset, size_bytes)], self._region.segment)
        remote = self._agent.get_xfer_descs([source.descriptor(source_offset, size_bytes)], source.segment)
        try:
            handle = self._agent.initialize_xfer("READ", local, remote, peer)
        except _PEER_ERRORS:
            return Read(None, ReadState.LOST)
        read = Read(handle, ReadState.MOVING)
        try:
            self._settle(read, self._agent.transfer(handle))
        except _PEER_ERRORS:
            self._finish(read, ReadState.LOST)
        return read

    def poll(self, read: Read) -> ReadState:
        """The present state of `read`. The handle is released once it is not moving."""
        if read.state is ReadState.MOVING:
            try:
                self._settle(read, self._agent.check_xfer_state(read.handle))
            except _PEER_ERRORS:
                self._finish(read, ReadState.LOST)
        return read.state

    def _settle(self, read: Read, state: str) -> None:
        if state == "DONE":
            self._finish(read, ReadState.DONE)
        elif state != "PROC":
            self._finish(read, ReadState.LOST)

    def _finish(self, read: Read, state: ReadState) -> None:
        read.state = state
        try:
            self._agent.release_xfer_handle(read.handle)
        except _PEER_ERRORS:
            return  # the wrapper keeps such a handle on its leak list; the state is known all the same
