"""How long each stage of a request took, as clients are told: milliseconds."""

from __future__ import annotations

import msgspec

from serving.stages import Report


class StageTimes(msgspec.Struct, frozen=True):
    """Milliseconds by stage. Stages overlap: `first_token` and `total` count from the request's arrival.

    `encode` spans all items; `ec_transfer` is the slowest item's and part of `prefill`.
    """

    render: float
    encode: float
    ec_transfer: float
    prefill: float
    first_token: float
    decode: float | None = None
    total: float | None = None


def stage_times(
    report: Report, *, arrived_at: float, rendered_at: float, first_at: float, ended_at: float | None = None
) -> StageTimes:
    """From a pipeline's report and moments (seconds of one monotonic clock) at the front."""
    return StageTimes(
        render=_ms(rendered_at - arrived_at),
        encode=_ms(report.encode_s),
        ec_transfer=_ms(report.ec_transfer_s),
        prefill=_ms(report.prefill_s),
        first_token=_ms(first_at - arrived_at),
        decode=None if ended_at is None else _ms(ended_at - first_at),
        total=None if ended_at is None else _ms(ended_at - arrived_at),
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
