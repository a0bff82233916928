"""How far an answer has come, and what is kept of its request meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serving.errors import EncodingUnavailable
from serving.protocol import DecodeChunk, EncodingRef, Feature, Tensors
from serving.stages import Admission, PipelineRequest

__all__ = ["LightAdmission", "Progress", "lightened", "with_pixels"]


class Progress:
    """What a client has been given of an answer."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._last_at = 0.0
        self.has_begun = False

    @property
    def token_ids(self) -> Sequence[int]:
        return self._token_ids

    @property
    def text(self) -> str:
        return "".join(self._text)

    def add(self, chunk: DecodeChunk, now: float) -> float | None:
        """Take a chunk that came at `now`. Returns the seconds that each of its tokens took; None for the first."""
        since_s = now - self._last_at
        self._last_at = now
        has_begun, self.has_begun = self.has_begun, True
        self._token_ids += chunk.token_ids
        self._text.append(chunk.text)
        return since_s / len(chunk.token_ids) if has_begun and chunk.token_ids else None


class LightAdmission(msgspec.Struct, frozen=True):
    """An admission whose features hold no pixels any more."""

    features: tuple[Feature, ...]
    refs: dict[str, EncodingRef]
    unresolved: tuple[str, ...]

    @classmethod
    def of(cls, admitted: Admission) -> LightAdmission:
        return cls(tuple(_light(feature) for feature in admitted.features), admitted.refs, admitted.unresolved)


def lightened(request: PipelineRequest) -> PipelineRequest:
    """The request without pixels: 11 MiB a megapixel that an answer which is being written hardly ever needs again.

    Its features still count as having tensors. What a resumed request needs is nearly always at prefill or at an
    encoder; if not, `PipelineRequest.recall` finds what the renderer's own bounded cache still has.
    """
    return msgspec.structs.replace(request, features=tuple(_light(feature) for feature in request.features))


def with_pixels(feature: Feature, request: PipelineRequest) -> Feature:
    """The feature as an encoder that does not hold it needs it.

    Raises:
        EncodingUnavailable: The pixels were let go of when the answer began, and the renderer has forgotten them too.
    """
    if not isinstance(feature.payload, Tensors) or feature.payload.frames:
        return feature
    tensors = None if request.recall is None else request.recall(feature)
    if tensors is None:
        raise EncodingUnavailable("the item is lost and its pixels are gone", hashes=[feature.identifier])
    return msgspec.structs.replace(feature, payload=tensors)


def _light(feature: Feature) -> Feature:
    if not isinstance(feature.payload, Tensors):
        return feature
    return msgspec.structs.replace(feature, payload=msgspec.structs.replace(feature.payload, frames=()))
