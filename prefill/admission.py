"""The per-model admission policy at the prefill ingress.

Encoder outputs and cached prefix tokens do not hold what M-RoPE set-up reads, and an engine reads it when it
first takes a request on, whatever its caches say. So each item is judged by what is there of it, after resolution
against prefill's receiver cache:

    there                        M-RoPE / XD-RoPE model           other model
    tensors                      admit                            admit
    metadata and reference       admit if every field is there    admit
    metadata, no reference       ECReferenceRequired              as "nothing, no reference"
    nothing, reference           FeatureDataRequired              admit
    nothing, no reference        FeatureDataRequired              admit to the engine's guard

Metadata that prefill itself kept of an item is no claim of a client's: with it alone an M-RoPE request goes to the
guard, which lets it run on a slab or prefix hit only. `check` is pure and stateless; it runs in the ingress
(features of our own renderer and of clients) and again at prefill's own door. docs/feature_contract.md has an
example for every cell.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prefill.items import Inspected, inspect, known_items
from prefill.layout import NamedFeature, check_length, check_vocabulary, named
from prefill.requirement import FeatureRequirement, Need
from serving.errors import (
    ECReferenceRequired,
    FeatureDataRequired,
    ItemTooLarge,
    TriptychError,
    UnusedReference,
)
from serving.protocol import EncodingRef, Feature, Metadata, Placeholder, ResolvedItem, Tensors
from serving.references import salt_digest

__all__ = ["Admission", "Admitted", "Decision", "FeatureRequirement", "Need", "check"]

_POSITION_FACTOR = 4
"""vLLM's M-RoPE tables hold four times the longest prompt (`MRotaryEmbedding`); past their end an engine dies."""


class Decision(StrEnum):
    """How an admitted item reaches prefill's engine."""

    TENSORS = "tensors"
    """Its tensors were sent. A reference beside them is ignored."""
    METADATA_AND_REF = "metadata_and_ref"
    """Its encoding is read by reference, its positions from metadata; both were issued together."""
    REF_ONLY = "ref_only"
    """Its encoding is read by reference. The model needs no metadata."""
    HELD = "held"
    """Prefill's receiver cache holds its tensors and its own vision tower will encode them."""
    NOTHING = "nothing"
    """No tensors and no reference: the engine's guard lets it run on a slab or prefix hit only."""
    UNRESOLVED = "unresolved"
    """Prefill has not been asked yet what it holds. Only where `check` was called without `held`."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """One item as it may go on.

    `feature` has an explicit mask where the range is not uniform, and the payload that may be used: unconfirmed
    metadata is taken out. `unchecked` names checks that nobody knew how to make: `rows`, `tensors`.
    """

    feature: Feature
    decision: Decision
    ref: EncodingRef | None
    rows: int
    unchecked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """An admitted request; `items` follow the order of its features."""

    items: tuple[Admitted, ...]

    @property
    def features(self) -> tuple[Feature, ...]:
        return tuple(item.feature for item in self.items)

    @property
    def refs(self) -> dict[str, EncodingRef]:
        """References worth following, by identifier."""
        return {item.feature.identifier: item.ref for item in self.items if item.ref is not None}

    @property
    def unresolved(self) -> tuple[str, ...]:
        """Identifiers to ask prefill about, each once, before `check` is called again with the answer."""
        waiting = (i.feature.identifier for i in self.items if i.decision is Decision.UNRESOLVED)
        return tuple(dict.fromkeys(waiting))


def check(
    requirement: FeatureRequirement,
    token_ids: Sequence[int],
    features: Sequence[Feature],
    refs: Mapping[str, EncodingRef | None],
    *,
    cache_salt: str | None,
    verify: Callable[[EncodingRef], bool],
    held: Mapping[str, ResolvedItem] | None = None,
    rendered: bool = False,
    epochs: Mapping[str, str] | None = None,
) -> Admission:
    """Admit a request, or refuse it whole for its first bad item.

    Args:
        requirement: The model's policy.
        token_ids: The whole prompt, placeholders expanded.
        features: Its items, in any order.
        refs: What came under `ec_transfer_params`, by identifier; None for an entry without a reference.
        cache_salt: The tenant. A reference issued to another one is no reference.
        verify: Whether a reference is genuine, unexpired and names an allowed peer.
        held: What prefill holds, by identifier, once it was asked; None before that, which leaves items that
            depend on the answer `UNRESOLVED` instead of refusing them.
        rendered: Whether our own renderer made the features, so that their rows and masks are vLLM's own.
        epochs: Current epoch of peers, by address; a reference of another epoch is no reference.

    Raises:
        TriptychError: One of the InvalidRequest family. `param` names the item, `hashes` every item refused for
            the same reason. Permanent: the same request fails again.
    """
    check_length(requirement, token_ids)
    items = named(requirement, features, len(token_ids))
    present = {item.feature.identifier for item in items}
    stray = [name for name in refs if name not in present]
    if stray:
        raise UnusedReference("a reference names no item of this request", "ec_transfer_params", stray)
    genuine = _genuine_references(refs, held or {}, cache_salt, verify, epochs or {})
    known = known_items(items, genuine, held or {})
    inspected = [inspect(requirement, item, known[item.feature.identifier], token_ids, rendered) for item in items]
    check_vocabulary(requirement, token_ids, _compared_ranges(requirement, inspected))
    _check_totals(requirement, inspected)
    verdicts = [_verdict(requirement, item, held is not None) for item in inspected]
    _refuse_first(requirement, inspected, verdicts)
    return Admission(
        tuple(_admitted(i, v) for i, v in zip(inspected, verdicts, strict=True) if isinstance(v, Decision))
    )


def decide(
    need: Need, *, tensors: bool, metadata: bool, ref: bool, trusted: bool, held_tensors: bool, asked: bool
) -> Decision | type[TriptychError]:
    """The table, as a function of what is there of one item.

    Args:
        need: What the model needs of the item's modality.
        tensors: They were sent.
        metadata: It was sent, or prefill holds it.
        ref: A valid one was sent, or prefill issued one to its own slab.
        trusted: Prefill holds this metadata itself.
        held_tensors: Prefill's receiver cache holds the tensors.
        asked: Whether prefill was asked.
    """
    if tensors:
        return Decision.TENSORS
    if need < Need.TENSORS and ref and metadata:
        return Decision.METADATA_AND_REF
    if need is Need.NOTHING and ref:
        return Decision.REF_ONLY
    if held_tensors:
        return Decision.HELD
    if not asked:
        return Decision.UNRESOLVED
    if need is Need.NOTHING or (need is Need.METADATA and metadata and trusted):
        return Decision.NOTHING
    return ECReferenceRequired if need is Need.METADATA and metadata else FeatureDataRequired


def _genuine_references(
    refs: Mapping[str, EncodingRef | None],
    held: Mapping[str, ResolvedItem],
    cache_salt: str | None,
    verify: Callable[[EncodingRef], bool],
    epochs: Mapping[str, str],
) -> dict[str, EncodingRef]:
    """References worth the name. Prefill's own copy comes before a client's: it needs no transfer."""
    tenant = salt_digest(cache_salt)
    own = {name: item.ref for name, item in held.items() if item.ref is not None}
    return {
        name: ref
        for offered in (refs, own)
        for name, ref in offered.items()
        if ref is not None
        and ref.identifier == name
        and _has_wire_numbers(ref)
        and ref.salt_digest == tenant
        and epochs.get(ref.peer, ref.epoch) == ref.epoch
        and verify(ref)
    }


def _has_wire_numbers(ref: EncodingRef) -> bool:
    """Whether the reference's numbers are ones that a server can have put on the wire; JSON allows any."""
    numbers = (*ref.shape, ref.generation, ref.size_bytes, ref.digest, ref.offset or 0)
    return all(0 <= number < 1 << 64 for number in numbers)


def _compared_ranges(requirement: FeatureRequirement, items: Sequence[Inspected]) -> list[Placeholder]:
    """Ranges whose every token was compared with the one that stands for a row."""
    return [
        item.placeholder
        for item in items
        if item.placeholder.is_embed is None and requirement.embed_token(item.named.feature.modality) is not None
    ]


def _check_totals(requirement: FeatureRequirement, items: Sequence[Inspected]) -> None:
    """What the request's items take together.

    A request reserves slab space for all its items at once, so one that can never have it would wait for ever.
    """
    rows = sum({item.identifier: item.rows for item in items}.values())
    most = requirement.max_rows_per_request
    if most is not None and rows > most:
        names = list(dict.fromkeys(item.identifier for item in items))
        raise ItemTooLarge(f"the items need {rows} rows together; at most {most} are held at once", "features", names)
    span = 0
    for item in items:
        span += item.time_span
        if span > (_POSITION_FACTOR - 1) * requirement.max_model_len:
            raise item.named.invalid("its frames lie too far apart in time for the model's positions")


def _verdict(requirement: FeatureRequirement, item: Inspected, asked: bool) -> Decision | type[TriptychError]:
    known = item.known
    return decide(
        requirement.need(item.named.feature.modality),
        tensors=known.tensors is not None,
        metadata=bool(known.metadata) or (known.metadata is not None and not requirement.uses_mrope),
        ref=known.ref is not None,
        trusted=known.held_metadata is not None,
        held_tensors=known.held_tensors,
        asked=asked,
    )


def _refuse_first(
    requirement: FeatureRequirement, items: Sequence[Inspected], verdicts: Sequence[Decision | type[TriptychError]]
) -> None:
    """Raise for the first refused item; the hashes name all refused alike, so that one retry can mend them."""
    for item, verdict in zip(items, verdicts, strict=True):
        if isinstance(verdict, Decision):
            continue
        pairs = zip(items, verdicts, strict=True)
        alike = dict.fromkeys(other.identifier for other, refusal in pairs if refusal is verdict)
        raise verdict(_explain(requirement, item.named, verdict), item.named.label, list(alike))


def _explain(requirement: FeatureRequirement, item: NamedFeature, verdict: type[TriptychError]) -> str:
    if verdict is ECReferenceRequired:
        return f"{item.label}: its metadata came without a valid reference to its encoding; send one, or its tensors"
    if requirement.need(item.feature.modality) is Need.TENSORS:
        return f"{item.label}: this deployment takes {item.feature.modality} items with their tensors only"
    fields = ", ".join(sorted(requirement.required_fields(item.feature.modality))) or "feature data"
    return (
        f"{item.label}: {requirement.model} needs {fields} on every request, also when a cache holds the item; "
        "send its tensors, or its metadata with a reference"
    )


def _admitted(item: Inspected, decision: Decision) -> Admitted:
    """The item as it may go on: metadata that neither a reference nor prefill confirms stays behind."""
    known, sent = item.known, item.named.feature
    payload: Tensors | Metadata | None = known.tensors
    if payload is None and known.metadata is not None and (known.ref is not None or known.held_metadata is not None):
        payload = Metadata(dict(known.metadata))
    if decision is Decision.UNRESOLVED:
        payload = sent.payload
    feature = Feature(sent.modality, sent.identifier, item.placeholder, payload)
    ref = None if decision in (Decision.TENSORS, Decision.HELD, Decision.NOTHING) else known.ref
    return Admitted(feature, decision, ref, item.rows, item.unchecked)
