"""What is there of each item, and whether its parts agree with each other and with the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from prefill.families import FieldError
from prefill.layout import NamedFeature, placed
from prefill.requirement import FeatureRequirement, Need
from serving.errors import FeatureDataRequired, ItemTooLarge, MetadataMismatch, Unsupported
from serving.protocol import EncodingRef, Metadata, Placeholder, ResolvedItem, Tensors
from serving.references import metadata_digest

__all__ = ["Inspected", "Known", "inspect", "known_items"]

_MAX_NUMBERS = 65_536
"""Numbers in one metadata field. A video's timestamps are the longest; pixels are no metadata."""
_MAX_DEPTH = 4
_MAX_NUMBER = 2**53
"""Beyond it a JSON number is not exact, and no field needs it."""


@dataclass(slots=True)
class Known:
    """One identifier's parts, merged over its occurrences in the request and what prefill holds."""

    tensors: Tensors | None = None
    sent_metadata: Mapping[str, Any] | None = None
    held_metadata: Mapping[str, Any] | None = None
    held_tensors: bool = False
    ref: EncodingRef | None = None
    modality: str = ""

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """Tensors answer for themselves: no other part may lend them a field that they lack."""
        if self.tensors is not None:
            return self.tensors.metadata
        return self.held_metadata if self.sent_metadata is None else self.sent_metadata


@dataclass(frozen=True, slots=True)
class Inspected:
    """One occurrence of an item that contradicts nothing."""

    named: NamedFeature
    known: Known
    placeholder: Placeholder
    rows: int
    time_span: int
    unchecked: tuple[str, ...]

    @property
    def identifier(self) -> str:
        return self.named.feature.identifier


def known_items(
    items: Sequence[NamedFeature], refs: Mapping[str, EncodingRef], held: Mapping[str, ResolvedItem]
) -> dict[str, Known]:
    """What is there of each identifier. An identifier stands for one content, however often it occurs.

    Raises:
        InvalidFeature: Two occurrences differ, or tensors differ from what prefill holds under their identifier.
        MetadataMismatch: Metadata alone differs from what prefill holds.
    """
    known: dict[str, Known] = {}
    for item in items:
        feature = item.feature
        there = known.get(feature.identifier)
        if there is None:
            there = known[feature.identifier] = Known(ref=refs.get(feature.identifier), modality=feature.modality)
            _add_held(there, held.get(feature.identifier))
        if there.modality != feature.modality:
            raise item.invalid("its identifier names an item of another modality as well")
        match feature.payload:
            case Tensors() as tensors:
                _add_tensors(item, there, tensors)
            case Metadata(fields=fields):
                _add_metadata(item, there, fields)
    return known


def _add_held(there: Known, resolved: ResolvedItem | None) -> None:
    if resolved is not None:
        there.held_metadata = resolved.metadata
        there.held_tensors = resolved.has_tensors


def _add_tensors(item: NamedFeature, there: Known, tensors: Tensors) -> None:
    if there.tensors is not None and there.tensors != tensors:
        raise item.invalid("its identifier names an item with other tensors as well")
    if there.held_metadata is not None and there.held_metadata != tensors.metadata:
        raise item.invalid("its identifier already names an item with other metadata")
    if there.sent_metadata and there.sent_metadata != tensors.metadata:
        raise item.invalid("its identifier names an item with other metadata as well")
    there.tensors = tensors


def _add_metadata(item: NamedFeature, there: Known, fields: Mapping[str, Any]) -> None:
    """An empty set says nothing, so it contradicts nothing."""
    if not fields and there.metadata:
        return
    stated = there.sent_metadata if there.tensors is None else there.tensors.metadata
    if stated != fields and (stated or there.tensors is not None):
        raise item.invalid("its identifier names an item with other metadata as well")
    if there.held_metadata is not None and there.held_metadata != fields:
        raise _mismatch(item, "what prefill holds of the item")
    there.sent_metadata = fields


def inspect(
    requirement: FeatureRequirement, item: NamedFeature, known: Known, token_ids: Sequence[int], rendered: bool
) -> Inspected:
    """Hold the item's parts against each other: range, mask, metadata, tensors, reference.

    Raises:
        TriptychError: InvalidFeature, FeatureDataRequired, MetadataMismatch, ItemTooLarge or Unsupported.
    """
    ref = None if known.tensors is not None else known.ref
    _check_fields(requirement, item, known)
    if ref is not None and known.metadata is not None and metadata_digest(dict(known.metadata)) != ref.metadata_digest:
        raise _mismatch(item, "what its reference was issued for")
    confirmed = rendered or (ref is not None and ref.shape[0] == item.feature.placeholder.length)
    place = placed(requirement, item, token_ids, dense_is_known=confirmed)
    rows = place.num_embeds
    if rows > requirement.max_rows_per_item:
        message = f"{item.label}: it needs {rows} rows; the encoder cache takes {requirement.max_rows_per_item}"
        raise ItemTooLarge(message, item.label, [item.feature.identifier])
    if ref is not None:
        _check_reference(requirement, item, ref, rows)
    span, unchecked = _check_family(requirement, item, known, place, token_ids)
    if known.tensors is not None and "rows" in unchecked and requirement.refuse_unchecked and not rendered:
        message = f"{item.label}: this server cannot check tensors of {requirement.model}; send the media itself"
        raise Unsupported(message, item.label, [item.feature.identifier])
    return Inspected(item, known, place, rows, span, unchecked)


def _check_fields(requirement: FeatureRequirement, item: NamedFeature, known: Known) -> None:
    """Names and plain values of the metadata.

    Only a family knows every name: vLLM's declaration leaves out what processors keep beside it. Without a family
    an undeclared name passes, which is harmless: such metadata is used only where a reference confirms it.
    """
    if known.metadata is None:
        return
    modality = item.feature.modality
    required = requirement.required_fields(modality)
    if requirement.family is not None and not known.metadata.keys() <= required:
        raise item.invalid("its metadata holds fields that the model does not know")
    for name, value in known.metadata.items():
        if (known.tensors is None or name in required) and _count_numbers(value, _MAX_DEPTH) > _MAX_NUMBERS:
            raise item.invalid("each field of its metadata must be a number or a list of numbers")
        if not _fits_the_wire(value):
            raise item.invalid("a number in its metadata is too large")
    missing = _fields_needed(requirement, modality, known) - known.metadata.keys()
    names = ", ".join(sorted(missing))
    if missing and (known.metadata or known.tensors is not None) and requirement.need(modality) is not Need.NOTHING:
        message = f"{item.label}: its data lacks {names}, which {requirement.model} needs"
        raise FeatureDataRequired(message, item.label, [item.feature.identifier])
    if missing and known.tensors is not None:
        raise item.invalid(f"its tensors lack {names}")


def _fields_needed(requirement: FeatureRequirement, modality: str, known: Known) -> frozenset[str]:
    """Beside tensors only what the family says: of some declared fields processors make no tensor
    (`audio_num_tokens`, which vLLM takes from the placeholder)."""
    if known.tensors is None:
        return requirement.required_fields(modality)
    return frozenset() if requirement.family is None else requirement.family.fields(modality)


def _count_numbers(value: Any, depth: int) -> float:
    """Numbers in nested lists; infinite when anything else is in there, or one is not finite or too large."""
    if isinstance(value, int | float):
        return 1 if -_MAX_NUMBER <= value <= _MAX_NUMBER else math.inf
    if not isinstance(value, list | tuple) or depth == 0 or len(value) > _MAX_NUMBERS:
        return math.inf
    total = 0.0
    for inner in value:
        total += _count_numbers(inner, depth - 1)
        if total > _MAX_NUMBERS:
            return math.inf
    return total


def _fits_the_wire(value: Any) -> bool:
    """Whether every integer in nested lists is one that msgpack can hold."""
    if isinstance(value, list | tuple):
        return all(_fits_the_wire(inner) for inner in value)
    return not isinstance(value, int) or -(1 << 63) <= value < 1 << 64


def _check_reference(requirement: FeatureRequirement, item: NamedFeature, ref: EncodingRef, rows: int) -> None:
    if ref.shape[0] != rows:
        raise item.invalid(f"its range needs {rows} rows; its reference names {ref.shape[0]}")
    if requirement.row_width is not None and ref.shape[1] != requirement.row_width:
        raise item.invalid(f"rows of {requirement.model} are {requirement.row_width} wide, not {ref.shape[1]}")


def _check_family(
    requirement: FeatureRequirement,
    item: NamedFeature,
    known: Known,
    place: Placeholder,
    token_ids: Sequence[int],
) -> tuple[int, tuple[str, ...]]:
    """Rows, tensors and tokens by the family's rules: the item's time span, and the checks nobody could make."""
    modality = item.feature.modality
    family = requirement.family
    rows_by_ref = known.tensors is None and known.ref is not None
    if known.tensors is not None:
        _refuse_embeddings(item, known.tensors)
    if family is None:
        unchecked = () if rows_by_ref else ("rows",)
        return 0, unchecked if known.tensors is None else (*unchecked, "tensors")
    fields = known.metadata if known.metadata is not None and family.fields(modality) <= known.metadata.keys() else None
    try:
        rows = family.implied_rows(modality, fields)
        if rows is not None and rows != place.num_embeds:
            raise item.invalid(f"its range needs {place.num_embeds} rows; its data makes {rows}")
        if fields is None:
            return 0, () if rows_by_ref or rows is not None else ("rows",)
        if known.tensors is not None:
            family.check_tensors(modality, fields, known.tensors.info)
        family.check_tokens(modality, fields, token_ids[place.offset : place.end])
        return family.time_span(modality, fields), () if rows_by_ref or rows is not None else ("rows",)
    except FieldError as error:
        raise item.invalid(str(error)) from error


def _refuse_embeddings(item: NamedFeature, tensors: Tensors) -> None:
    """A vision tower that is handed its own output runs no check on it, and a wrong width ends an engine."""
    if any(name.partition("[")[0].endswith("_embeds") for name in tensors.info):
        message = f"{item.label}: precomputed embeddings are not taken; send the media, its tensors or a reference"
        raise Unsupported(message, item.label, [item.feature.identifier])


def _mismatch(item: NamedFeature, other: str) -> MetadataMismatch:
    message = f"{item.label}: its metadata differs from {other}"
    return MetadataMismatch(message, item.label, [item.feature.identifier])
