"""Transfer parameters that clients send along, judged before anything acts on them."""

from __future__ import annotations

from typing import Any

import msgspec

from serving.errors import InvalidRequest, TransferParamsRefused
from serving.protocol import EncodingRef

EC_PARAMS = "ec_transfer_params"
KV_PARAMS = "kv_transfer_params"


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one identifier's entry may hold. `metadata` and `item_indices` are upstream's and not needed here."""

    ref: EncodingRef | None = None
    metadata: dict[str, Any] | None = None
    item_indices: list[int] | None = None


def client_refs(
    extra_args: dict[str, Any] | None,
) -> tuple[dict[str, EncodingRef | None], dict[str, Any] | None]:
    """Split the client's references from the other extra arguments of its sampling parameters.

    Routes differ in how a client sends transfer parameters (body, `vllm_xargs`), but vLLM brings them all here.

    Returns:
        References by identifier, unverified, None for an entry without one; and what is left of `extra_args`, None
        when that is nothing.

    Raises:
        TransferParamsRefused: KV parameters, in any form. They carry addresses that an engine connects to.
        InvalidRequest: The references are not of the one accepted shape; `param` names the field. Permanent.
    """
    rest = dict(extra_args or {})
    if KV_PARAMS in rest:
        raise TransferParamsRefused(f"{KV_PARAMS} is set by the servers only", param=KV_PARAMS)
    given = rest.pop(EC_PARAMS, None)
    if given is None:
        return {}, rest or None
    if not isinstance(given, dict):
        raise InvalidRequest(f"{EC_PARAMS} must map identifiers to references", param=EC_PARAMS)
    return {name: _ref(name, entry) for name, entry in given.items()}, rest or None


def _ref(identifier: str, entry: Any) -> EncodingRef | None:
    param = f"{EC_PARAMS}.{identifier}"
    try:
        ref = msgspec.convert(entry, _Entry).ref
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"not a reference: {error}", param=param) from error
    if ref is not None and ref.identifier != identifier:
        raise InvalidRequest("the reference is for another item", param=f"{param}.ref.identifier")
    return ref
