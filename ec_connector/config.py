"""The connector's settings, from vLLM's `ec_connector_extra_config`."""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from typing import Any

import msgspec

from ec_connector.pool import granule_bytes

LOOPBACK_NETWORKS = ("127.0.0.0/8", "::1/128")


class ECConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What an operator may set. Seconds and bytes are in the names.

    Args:
        control_host: IP address that peers reach this engine's control socket at. Bound and announced.
        control_port: Port of rank 0, rank r listens on this plus r; 0 lets the system choose.
        slab_bytes: Registered memory that holds encodings, per worker.
        inflight_bytes: Part of a consumer's slab beyond what vLLM's encoder cache may keep views of.
        read_deadline_s: From the first request to a peer until its item is given up.
        quarantine_s: How long an extent with an unsettled read is watched before its peer is dropped.
        pin_lease_s: How long an announcement keeps its item in place when nobody reads it.
        busy_wait_s: How long a request waits for room in a slab full of pins.
        secret_hex: Cluster secret for the control sockets, as hex digits. May be empty on loopback only.
        peer_networks: Networks (CIDR) whose addresses may be read from.
    """

    control_host: str
    control_port: int = 0
    slab_bytes: int = 256 << 20
    inflight_bytes: int = 64 << 20
    read_deadline_s: float = 10.0
    quarantine_s: float = 30.0
    pin_lease_s: float = 60.0
    busy_wait_s: float = 5.0
    secret_hex: str = ""
    peer_networks: tuple[str, ...] = LOOPBACK_NETWORKS

    @property
    def secret(self) -> bytes:
        return bytes.fromhex(self.secret_hex)

    def allows(self, host: str) -> bool:
        """Whether `host`, an IP address, lies in one of the peer networks."""
        return _lies_in(host, self.peer_networks)


class Limits(msgspec.Struct, frozen=True):
    """Times in seconds; `reader` of `readers` is this rank among those that read each lease."""

    read_deadline_s: float
    quarantine_s: float
    reader: int
    readers: int


@functools.lru_cache(maxsize=1024)  # asked for every read, and parsing costs more than the rest of the check
def _lies_in(host: str, networks: tuple[str, ...]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return any(address in ipaddress.ip_network(network) for network in networks)


def parse_config(extra: Mapping[str, Any]) -> ECConfig:
    """The checked settings.

    Raises:
        ValueError: A key is unknown, missing or of the wrong type, or values contradict each other. Permanent.
    """
    try:
        config = msgspec.convert(dict(extra), ECConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"ec_connector_extra_config: {error}") from error
    for problem in _problems(config):
        raise ValueError(f"ec_connector_extra_config: {problem}")
    return config


def _problems(config: ECConfig) -> list[str]:
    problems = []
    try:
        loopback = ipaddress.ip_address(config.control_host).is_loopback
    except ValueError:
        return [f"control_host must be an IP address that peers can reach, not {config.control_host!r}"]
    try:
        secret_bytes = len(config.secret)
    except ValueError:
        return ["secret_hex must consist of hexadecimal digits"]
    if not loopback and secret_bytes == 0:
        problems.append(f"secret_hex is required because control_host {config.control_host} is not a loopback address")
    if 0 < secret_bytes < 16:
        problems.append(f"secret_hex must hold at least 16 bytes, it holds {secret_bytes}")
    for network in config.peer_networks:
        try:
            ipaddress.ip_network(network)
        except ValueError:
            problems.append(f"peer_networks: {network!r} is not a network in CIDR form")
    if config.pin_lease_s <= config.read_deadline_s + config.quarantine_s:
        problems.append(
            f"pin_lease_s {config.pin_lease_s} must exceed read_deadline_s {config.read_deadline_s} + quarantine_s"
            f" {config.quarantine_s}, or a producer reuses memory that is still being read"
        )
    if min(config.slab_bytes, config.read_deadline_s, config.busy_wait_s, config.quarantine_s) <= 0:
        problems.append("slab_bytes, read_deadline_s, quarantine_s and busy_wait_s must be positive")
    if config.inflight_bytes < 0:
        problems.append("inflight_bytes must not be negative")
    if not 0 <= config.control_port < 65536:
        problems.append(f"control_port {config.control_port} is not a port")
    return problems


def check_slab_size(config: ECConfig, *, cache_rows: int, row_bytes: int) -> None:
    """Refuse a consumer's slab that vLLM's encoder cache could fill with views.

    vLLM evicts only when its own budget is short, and that is after the connector let the request pass. The bound
    holds for items of one row each, which waste most.

    Args:
        config: The settings.
        cache_rows: Rows that vLLM's encoder cache may hold (`encoder_cache_size`).
        row_bytes: Bytes of the widest row of encoder output.

    Raises:
        ValueError: The slab is too small; names the size needed. Permanent.
    """
    needed = cache_rows * granule_bytes(row_bytes) + config.inflight_bytes
    if config.slab_bytes < needed:
        raise ValueError(
            f"slab_bytes is {config.slab_bytes}, but a consumer needs at least {needed}: vLLM's encoder cache holds up"
            f" to {cache_rows} rows of {row_bytes} bytes (in pages), plus inflight_bytes"
            f" {config.inflight_bytes}. Raise slab_bytes, or lower max_num_batched_tokens if that sets the rows and"
            " not the model's largest item"
        )
