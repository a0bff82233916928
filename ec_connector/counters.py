"""The numbers of one agent, for `ec_stats` and Prometheus."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ec_connector.lanes import Lane
from ec_connector.protocol import Reason

if TYPE_CHECKING:
    from ec_connector.core import Core

GAUGES = frozenset(
    {
        "capacity_bytes",
        "used_bytes",
        "pinned_bytes",
        "quarantined_bytes",
        "filling",
        "ready",
        "pinned",
        "quarantined",
        "open_pins",
        "open_leases",
        "slowest_probe_bytes_per_s",
        *(f"peers_{lane}" for lane in Lane),
    }
)
"""Names of values that also fall."""

COUNTERS = frozenset(
    {
        "evictions",
        "saves",
        "save_bytes",
        "saves_skipped",
        "loads",
        "hits",
        "reads",
        "reads_in_place",
        "read_bytes",
        "read_seconds",
        "leases_expired",
        "leases_revoked",
        "nacks_sent",
        "nacks_received",
        "tcp_fallbacks",
        *(f"failed_{reason}" for reason in Reason),
    }
)
"""Names of values that only grow."""


def counters(core: Core) -> dict[str, float]:
    """Counters and gauges by name; sizes and seconds say so in theirs."""
    numbers: dict[str, float] = {
        **msgspec.structs.asdict(core.pool.stats()),
        "saves": core.saves,
        "save_bytes": core.save_bytes,
        "saves_skipped": core.saves_skipped,
        "loads": core.loads,
        "hits": core.consumer.hits,
        "reads": core.fetches.reads,
        "reads_in_place": core.fetches.reads_in_place,
        "read_bytes": core.fetches.read_bytes,
        "read_seconds": core.fetches.read_seconds,
        "open_pins": core.consumer.open_pins,
        "open_leases": core.producer.open_leases,
        "leases_expired": core.producer.leases_expired,
        "leases_revoked": core.producer.leases_revoked,
        "nacks_sent": core.producer.nacks,
        "nacks_received": core.fetches.nacks,
        "tcp_fallbacks": core.probes.fallbacks,
        "slowest_probe_bytes_per_s": core.probes.slowest_bytes_per_s,
    }
    numbers.update({f"failed_{reason}": core.consumer.failures.get(reason, 0) for reason in Reason})
    lanes = list(core.probes.lanes.values())
    return numbers | {f"peers_{lane}": lanes.count(lane) for lane in Lane}
