"""Where the items stand in the prompt: ranges and masks, judged before anything else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from prefill.requirement import FeatureRequirement
from serving.errors import InvalidFeature, InvalidRequest
from serving.protocol import Feature, Placeholder

__all__ = ["NamedFeature", "check_length", "check_vocabulary", "named", "placed", "rebuild_is_embed"]

_MAX_NAME_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class NamedFeature:
    """A feature and how errors call it: `features.image[1]`, counted within its modality in the sender's order."""

    label: str
    feature: Feature

    def invalid(self, message: str) -> InvalidFeature:
        return InvalidFeature(f"{self.label}: {message}", self.label, [self.feature.identifier])


def check_length(requirement: FeatureRequirement, token_ids: Sequence[int]) -> None:
    """Refuse a prompt that is empty, or that leaves no room for one token of an answer.

    Raises:
        InvalidRequest: It is.
    """
    limit = requirement.max_model_len - 1
    if not token_ids:
        raise InvalidRequest("the prompt has no tokens", "token_ids")
    if len(token_ids) > limit:
        raise InvalidRequest(f"the prompt has {len(token_ids)} tokens; {requirement.model} takes {limit}", "token_ids")


def check_vocabulary(
    requirement: FeatureRequirement, token_ids: Sequence[int], known_ranges: Sequence[Placeholder]
) -> None:
    """Refuse token ids outside the vocabulary.

    Args:
        known_ranges: Ranges found to hold nothing but their placeholder token. They are most of a prompt, and
            looking at each of their tokens once more would be most of this policy's cost.

    Raises:
        InvalidRequest: An id is outside.
    """
    others: list[int] = []
    position = 0
    for place in sorted(known_ranges, key=lambda place: place.offset):
        others += token_ids[position : place.offset]
        position = place.end
    others += token_ids[position:]
    if others and (min(others) < 0 or max(others) >= requirement.vocab_size):
        raise InvalidRequest(f"token ids must lie from 0 to {requirement.vocab_size - 1}", "token_ids")


def named(requirement: FeatureRequirement, features: Sequence[Feature], prompt_length: int) -> list[NamedFeature]:
    """The features with their names, in the sender's order, after judging modality, count and ranges.

    Every range is judged, also one that a later prefill chunk would reach.

    Raises:
        InvalidFeature: A modality that the model does not take, or a range outside the prompt or over another.
        InvalidRequest: More items of a modality than the deployment allows.
    """
    counts: Counter[str] = Counter()
    items = []
    for feature in features:
        modality = feature.modality
        item = NamedFeature(f"features.{modality[:32]}[{counts[modality]}]", feature)
        counts[modality] += 1
        if modality not in requirement.metadata_fields:
            raise item.invalid(f"{requirement.model} takes no items of this modality")
        limit = requirement.limits.get(modality)
        if limit is not None and counts[modality] > limit:
            raise InvalidRequest(f"at most {limit} {modality} items per prompt", f"features.{modality}")
        _check_range(item, prompt_length)
        items.append(item)
    _check_apart(items)
    return items


def _check_range(item: NamedFeature, prompt_length: int) -> None:
    feature, place = item.feature, item.feature.placeholder
    if not 0 < len(feature.identifier) <= _MAX_NAME_LENGTH:
        raise item.invalid(f"its identifier must have 1 to {_MAX_NAME_LENGTH} characters")
    if place.length < 1 or place.offset < 0 or place.end > prompt_length:
        raise item.invalid(f"its placeholder range must lie inside the prompt's {prompt_length} tokens")
    if place.is_embed is not None and len(place.is_embed) != place.length:
        raise item.invalid("is_embed must have one entry for each token of the range")


def _check_apart(items: Sequence[NamedFeature]) -> None:
    ordered = sorted(items, key=lambda item: item.feature.placeholder.offset)
    for before, after in pairwise(ordered):
        if after.feature.placeholder.offset < before.feature.placeholder.end:
            raise after.invalid(f"its placeholder range overlaps that of {before.label}")


def rebuild_is_embed(
    token_ids: Sequence[int], placeholder: Placeholder, embed_token_id: int
) -> tuple[bool, ...] | None:
    """Which tokens of the range carry an embedding, told by the tokens themselves; None when all do.

    Token-in requests carry offset and length only. Without the mask a video whose frames are separated by
    timestamps would have embeddings laid over its text.
    """
    ids = token_ids[placeholder.offset : placeholder.end]
    if ids.count(embed_token_id) == len(ids):
        return None
    return tuple(token == embed_token_id for token in ids)


def placed(
    requirement: FeatureRequirement,
    item: NamedFeature,
    token_ids: Sequence[int],
    *,
    dense_is_known: bool,
) -> Placeholder:
    """The item's placeholder with its mask made explicit wherever the range is not uniform.

    Args:
        dense_is_known: Whether a missing mask on a range of mixed tokens may be read as "every token": our own
            renderer made the range, or a reference confirms its rows.

    Raises:
        InvalidFeature: The tokens are not this modality's placeholders, or the mask cannot be told from them.
    """
    place, modality = item.feature.placeholder, item.feature.modality
    token = requirement.embed_token(modality)
    if token is None:
        return _placed_without_token(item, token_ids, dense_is_known)
    mask = rebuild_is_embed(token_ids, place, token)
    if mask is not None:
        gaps = requirement.family is None or requirement.family.allows_gaps(modality)
        if not any(mask) or not gaps:
            raise item.invalid(f"the tokens of its range are not {modality} placeholders")
    if place.is_embed is not None and place.is_embed != (mask or (True,) * place.length):
        raise item.invalid("is_embed contradicts the tokens of the range")
    return Placeholder(place.offset, place.length, mask)


def _placed_without_token(item: NamedFeature, token_ids: Sequence[int], dense_is_known: bool) -> Placeholder:
    place = item.feature.placeholder
    if place.is_embed is not None:
        if not any(place.is_embed):
            raise item.invalid("is_embed marks no token")
        return place
    ids = token_ids[place.offset : place.end]
    if ids.count(ids[0]) == len(ids):
        return place
    if dense_is_known:
        return Placeholder(place.offset, place.length, (True,) * place.length)
    raise item.invalid("is_embed is missing and cannot be told from the tokens of the range")
