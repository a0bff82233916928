"""How the servers of one application find, trust and wait for each other."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from configs.base import ConfigError, Frozen, Seconds, SizeBytes

__all__ = ["ClusterConfig", "EncodingTransferConfig", "MediaConfig"]

MAKE_SECRET = "openssl rand -hex 32 > FILE"
_MIN_SECRET_BYTES = 16
Port = Annotated[int, Field(ge=1024, le=65535)]


class EncodingTransferConfig(Frozen):
    """Time limits of the encoder-cache transfer."""

    read_deadline_s: Seconds = Field(
        10.0,
        description="Longest wait of a reader for one encoding, after which the item counts as lost and is encoded "
        "again. Bounds what a stalled encoder can cost a request.",
    )
    quarantine_s: Seconds = Field(
        30.0,
        description="How long an extent stays unused after a read into it was given up. A late DMA write must find "
        "nobody else's data there.",
    )
    pin_lease_s: Seconds = Field(
        60.0,
        description="How long a producer keeps an announced encoding in place without hearing from its reader. Must "
        "exceed `read_deadline_s + quarantine_s`, so that no read outlives its source.",
    )
    busy_wait_s: Seconds = Field(
        2.0,
        description="Longest wait for room in a slab whose extents are all pinned, then 503 with Retry-After: a "
        "bounded wait instead of a queue that nobody sees.",
    )

    @property
    def reference_lifetime_s(self) -> float:
        """Seconds a signed reference is valid: a read that starts at its expiry still ends within the pin lease."""
        return self.pin_lease_s - self.read_deadline_s - self.quarantine_s

    @model_validator(mode="after")
    def _lease_outlives_reads(self) -> Self:
        if self.reference_lifetime_s <= 0:
            raise ValueError(
                f"pin_lease_s ({self.pin_lease_s:g}) must exceed read_deadline_s + quarantine_s "
                f"({self.read_deadline_s + self.quarantine_s:g})"
            )
        return self


class MediaConfig(Frozen):
    """What the ingress fetches and decodes on behalf of clients."""

    allowed_domains: tuple[str, ...] = Field(
        (),
        description="Hosts from which media URLs may be fetched. Empty: only data URLs and uploads, since a server "
        "that fetches any URL reaches private services (SSRF). Redirects are checked against the same list.",
    )
    fetch_timeout_s: Annotated[int, Field(ge=1)] = Field(
        5, description="Longest wait for one media URL, in whole seconds: the request waits meanwhile."
    )
    max_download_bytes: Annotated[int, Field(ge=1 << 20)] = Field(
        64 << 20, description="Largest download of one media URL. Bounds ingress memory per item; at least 1 MiB."
    )
    max_image_pixels: Annotated[int, Field(ge=1)] = Field(
        33_554_432,
        description="Largest image in pixels, checked from its header before it is decoded (decompression bombs). "
        "The default is 32 megapixels, about 3 s of render time on one core.",
    )


class ClusterConfig(Frozen):
    """Addresses, trust and leases, the same for all models of the application."""

    advertise_host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address at which a replica's KV and encoder-cache side channels listen and are announced. `auto` "
        "takes the node's own IP, which clusters need. The default keeps everything on this machine.",
    )
    cluster_secret_file: Path | None = Field(
        None,
        description="File whose content signs references and authenticates control messages; the same on every node. "
        f"Make one with `{MAKE_SECRET}`. May be left out on loopback only, where each start draws its own.",
    )
    side_channel_port_range: tuple[Port, Port] | None = Field(
        None,
        description="First and last port for side channels, both included. Left out, the system picks free ports, "
        "which firewalls between nodes refuse. Allow eight for each replica on a node.",
    )
    peer_networks: tuple[str, ...] = Field(
        ("127.0.0.0/8",),
        min_length=1,
        description="Networks (CIDR) whose addresses a reference may name. A reference makes an engine connect "
        "somewhere: nothing outside this list is ever contacted.",
    )
    kv_lease_s: Annotated[int, Field(ge=1)] = Field(
        30,
        description="How long prefill keeps a prompt's KV blocks for decode, in whole seconds. Too short repeats "
        "prefills when decode queues; too long holds KV memory for requests that went away.",
    )
    handoff_margin_s: Seconds = Field(
        5.0,
        description="Safety margin before the end of the KV lease, after which prefill runs again instead: a read "
        "past the lease returns wrong tokens without an error. At least `clock_skew_s` plus the longest engine step.",
    )
    clock_skew_s: Annotated[float, Field(ge=0)] = Field(
        1.0, description="Largest difference between the clocks of two nodes; references expire this much early."
    )
    max_grpc_bytes: SizeBytes = Field(
        512 << 10,
        validate_default=True,
        description="Largest message from the ingress to a stage that goes over gRPC, on a port of the system's choice "
        "at each replica. Larger ones go through Ray's object store, which takes them faster and small ones slower. "
        "0 sends all through Ray, where a firewall closes such ports.",
    )
    encoding_transfer: EncodingTransferConfig = Field(
        EncodingTransferConfig(), description="Time limits of the encoder-cache transfer."
    )

    @property
    def is_loopback(self) -> bool:
        """Whether no server can be reached, or reach out, beyond this machine."""
        return _is_loopback(self.advertise_host) and all(
            ipaddress.ip_network(network).is_loopback for network in self.peer_networks
        )

    def secret(self) -> bytes | None:
        """The cluster secret, or None on loopback without a file (the composition root then draws one).

        Raises:
            ConfigError: The file cannot be read or is too short.
        """
        if self.cluster_secret_file is None:
            return None
        key = "cluster.cluster_secret_file"
        try:
            secret = self.cluster_secret_file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"{key}: cannot read {self.cluster_secret_file}: {error.strerror}") from error
        if len(secret) < _MIN_SECRET_BYTES:
            raise ConfigError(
                f"{key}: {self.cluster_secret_file} holds {len(secret)} bytes, at least {_MIN_SECRET_BYTES} are "
                f"needed; make one with `{MAKE_SECRET}`"
            )
        return secret

    @model_validator(mode="after")
    def _addresses_agree(self) -> Self:
        networks = []
        for network in self.peer_networks:
            try:
                networks.append(ipaddress.ip_network(network))
            except ValueError as error:
                raise ValueError(f"peer_networks: {error}; expected a network such as 10.0.0.0/16") from None
        address = _literal_address(self.advertise_host)
        if address is not None and not any(address in network for network in networks):
            raise ValueError(f"advertise_host {self.advertise_host} lies in none of peer_networks; add its network")
        return self

    @model_validator(mode="after")
    def _secret_beyond_loopback(self) -> Self:
        if self.cluster_secret_file is None and not self.is_loopback:
            raise ValueError(
                f"cluster_secret_file is required beyond loopback (advertise_host {self.advertise_host}, peer_networks "
                f"{', '.join(self.peer_networks)}); make one with `{MAKE_SECRET}` and copy it to every node"
            )
        return self

    @model_validator(mode="after")
    def _ranges(self) -> Self:
        if self.side_channel_port_range is not None:
            first, last = self.side_channel_port_range
            if last < first:
                raise ValueError(f"side_channel_port_range [{first}, {last}]: the first port must not exceed the last")
        if not self.clock_skew_s < self.handoff_margin_s < self.kv_lease_s:
            raise ValueError(
                f"expected clock_skew_s ({self.clock_skew_s:g}) < handoff_margin_s ({self.handoff_margin_s:g}) "
                f"< kv_lease_s ({self.kv_lease_s})"
            )
        if self.encoding_transfer.reference_lifetime_s <= self.clock_skew_s:
            raise ValueError("encoding_transfer.pin_lease_s leaves references less time than clock_skew_s; raise it")
        return self


def _literal_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _literal_address(host)
    return host == "localhost" or (address is not None and address.is_loopback)
