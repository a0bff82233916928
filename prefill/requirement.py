"""What one model needs of each item, and how a deployment may ask for more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from prefill.families import Family

__all__ = ["FeatureRequirement", "Need"]


class Need(IntEnum):
    """What an item must bring, or prefill must hold of it. Ordered: a greater need is a stricter one."""

    NOTHING = 0
    """A cached encoding is enough; the layout alone may be sent."""
    METADATA = 1
    """Feature data on every request, also when every cache would hit: position set-up reads it."""
    TENSORS = 2
    """The processed tensors themselves."""


@dataclass(frozen=True, slots=True)
class FeatureRequirement:
    """The admission policy of one model. Derived from the model, never from a request.

    Args:
        model: Name for messages.
        uses_mrope: `model_config.uses_mrope`; since vLLM 0.32 that covers XD-RoPE (`xdrope_section`) as well.
        metadata_fields: Per modality the model takes, the fields that vLLM declares as metadata
            (`MultiModalDataParser.placeholder_metadata_fields`); empty where it declares none.
        max_model_len: Prompt and answer together, in tokens.
        vocab_size: Token ids are below this.
        max_rows_per_item: Rows that both the encoder cache and the slab hold.
        family: The family's checks, or None; see `prefill.derive.family_of`.
        embed_tokens: Token ids that stand for one row, per modality, where no family says it.
        limits: Items per prompt, per modality; a modality left out is unlimited.
        max_rows_per_request: Rows of all items together that the slab can hold at once, or None for no limit.
        row_width: Numbers per row that the encoder puts out, or None when not known.
        refuse_unchecked: Refuse tensors whose rows no family can tell, unless our own renderer made them.
        stricter_needs: Needs that the configuration raised, per modality; see `stricter`.
    """

    model: str
    uses_mrope: bool
    metadata_fields: Mapping[str, frozenset[str]]
    max_model_len: int
    vocab_size: int
    max_rows_per_item: int
    family: Family | None = None
    embed_tokens: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    max_rows_per_request: int | None = None
    row_width: int | None = None
    refuse_unchecked: bool = False
    stricter_needs: Mapping[str, Need] = field(default_factory=dict)

    @property
    def derived_need(self) -> Need:
        """What the model itself needs: M-RoPE set-up reads metadata when the engine first takes the request on."""
        return Need.METADATA if self.uses_mrope else Need.NOTHING

    def need(self, modality: str) -> Need:
        return self.stricter_needs.get(modality, self.derived_need)

    def required_fields(self, modality: str) -> frozenset[str]:
        """Metadata that must be there: what vLLM declares, and what the family's position set-up reads besides."""
        declared = self.metadata_fields.get(modality, frozenset())
        return declared if self.family is None else declared | self.family.fields(modality)

    def embed_token(self, modality: str) -> int | None:
        by_family = None if self.family is None else self.family.embed_token(modality)
        return self.embed_tokens.get(modality) if by_family is None else by_family

    def stricter(self, needs: Mapping[str, str]) -> FeatureRequirement:
        """This requirement with some needs raised, as the configuration's `admission.stricter` asks.

        Meant for the ingress. A need of `tensors` there would refuse at prefill's own door what encoders have
        already turned into metadata and a reference.

        Args:
            needs: Per modality `nothing`, `metadata` or `tensors`.

        Raises:
            ValueError: A need is laxer than the model's own, or names what the model does not have. Meant to stop
                start-up; the message says why.
        """
        raised = dict(self.stricter_needs)
        for modality, word in needs.items():
            if modality not in self.metadata_fields:
                raise ValueError(f"admission.stricter.{modality}: {self.model} takes no {modality} items")
            if word.upper() not in Need.__members__:
                raise ValueError(f"admission.stricter.{modality}: {word!r} is not nothing, metadata or tensors")
            asked, present = Need[word.upper()], self.need(modality)
            if asked < present:
                raise ValueError(
                    f"admission.stricter.{modality}: {word!r} is laxer than {present.name.lower()!r}, which "
                    f"{self.model} needs{self._because(modality)}; leave it out or make it stricter"
                )
            raised[modality] = asked
        return replace(self, stricter_needs=raised)

    def _because(self, modality: str) -> str:
        if modality in self.stricter_needs or not self.uses_mrope:
            return ""
        fields = ", ".join(sorted(self.required_fields(modality))) or "an item's data"
        return f": it uses M-RoPE, whose set-up reads {fields} on every request, whatever the caches hold"
