"""The numbers of one agent, for `ec_stats` and Prometheus."""

from __future__ import annotations

import msgspec

from ec_connector.core import Core
from ec_connector.lanes import Lane


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
    numbers.update({f"failed_{reason}": number for reason, number in core.consumer.failures.items()})
    lanes = list(core.probes.lanes.values())
    return numbers | {f"peers_{lane}": lanes.count(lane) for lane in Lane}
