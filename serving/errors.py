"""Every error a client can be told, and how it reads over HTTP.

    TriptychError
    ├── InvalidRequest            400  the request itself is wrong; resending it unchanged cannot help
    │   ├── InvalidFeature        400  a feature's layout, fields or rows contradict each other or the prompt
    │   ├── FeatureDataRequired   400  the model needs feature data that the request left out
    │   ├── ECReferenceRequired   400  metadata came without a valid reference to the encoding
    │   ├── MetadataMismatch      400  metadata differs from what the reference was issued for
    │   ├── UnusedReference       400  a reference or transfer parameter for an item that is not in the request
    │   ├── TransferParamsRefused 400  transfer parameters that only the servers may set
    │   ├── ItemTooLarge          400  one item exceeds the encoder cache or the slab
    │   └── Unsupported           400  a feature of the API that this deployment cannot serve
    ├── MultiModalCacheMiss       400  no cache holds the item any more; resend it with tensors (retryable)
    ├── ModelNotFound             404
    ├── DuplicateRequest          409  the request id is in use
    ├── Overloaded                503  a bounded queue is full (Retry-After)
    │   └── EncoderBusy           503  every slab extent is pinned
    ├── EncodingUnavailable       503  an encoding was lost and encoding it once more did not help
    ├── StageUnavailable          503  a stage has no live replica
    ├── HandoffExpired            503  prefill's lease ended before decode could read its KV blocks
    ├── DeadlineExceeded          504  the request's own deadline passed
    └── EngineFault               500  an engine failed in a way that nothing above describes

Servers raise these; Ray pickles them; the ingress turns each into one JSON body. This module imports
neither vllm nor ray, so that every layer can raise from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

__all__ = [
    "DeadlineExceeded",
    "DuplicateRequest",
    "ECReferenceRequired",
    "EncoderBusy",
    "EncodingUnavailable",
    "EngineFault",
    "FeatureDataRequired",
    "HandoffExpired",
    "InvalidFeature",
    "InvalidRequest",
    "ItemTooLarge",
    "MetadataMismatch",
    "ModelNotFound",
    "MultiModalCacheMiss",
    "Overloaded",
    "StageUnavailable",
    "TransferParamsRefused",
    "TriptychError",
    "Unsupported",
    "UnusedReference",
    "error_body",
]


class TriptychError(Exception):
    """Base of all errors that reach a client.

    Args:
        message: One sentence for the client. Names the field or item; never quotes prompt text or pixels.
        param: Path of the offending field, such as `features.image[1]`, or None.
        hashes: Identifiers of the items concerned.
        retry_after_s: Seconds after which a retry is sensible; sent as Retry-After.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        param: str | None = None,
        hashes: Sequence[str] = (),
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message, param, tuple(hashes), retry_after_s)  # all of them, so that pickling keeps them
        self.message = message
        self.param = param
        self.hashes = tuple(hashes)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class InvalidRequest(TriptychError):
    code = "invalid_request"
    http_status = 400


class InvalidFeature(InvalidRequest):
    code = "invalid_feature"


class FeatureDataRequired(InvalidRequest):
    code = "feature_data_required"


class ECReferenceRequired(InvalidRequest):
    code = "ec_reference_required"


class MetadataMismatch(InvalidRequest):
    code = "metadata_mismatch"


class UnusedReference(InvalidRequest):
    code = "unused_reference"


class TransferParamsRefused(InvalidRequest):
    code = "transfer_params_refused"


class ItemTooLarge(InvalidRequest):
    code = "item_too_large"


class Unsupported(InvalidRequest):
    code = "unsupported"


class MultiModalCacheMiss(TriptychError):
    code = "multimodal_cache_miss"
    http_status = 400
    retryable = True


class ModelNotFound(TriptychError):
    code = "model_not_found"
    http_status = 404


class DuplicateRequest(TriptychError):
    code = "duplicate_request"
    http_status = 409
    retryable = True


class Overloaded(TriptychError):
    code = "overloaded"
    http_status = 503
    retryable = True


class EncoderBusy(Overloaded):
    code = "encoder_busy"


class EncodingUnavailable(TriptychError):
    code = "encoding_unavailable"
    http_status = 503
    retryable = True


class StageUnavailable(TriptychError):
    code = "stage_unavailable"
    http_status = 503
    retryable = True


class HandoffExpired(TriptychError):
    code = "handoff_expired"
    http_status = 503
    retryable = True


class DeadlineExceeded(TriptychError):
    code = "deadline_exceeded"
    http_status = 504
    retryable = True


class EngineFault(TriptychError):
    code = "engine_fault"


def error_body(error: TriptychError) -> dict[str, Any]:
    """The JSON body for `error`, the same on every route.

    `code` is the HTTP status, as in vLLM's own error bodies; `type` is our stable code.
    """
    return {
        "error": {
            "message": error.message,
            "type": error.code,
            "param": error.param,
            "code": error.http_status,
            "hashes": list(error.hashes),
            "retryable": error.retryable,
        }
    }
