"""The request and answer of `POST /generate` and of the deployment handle's `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from vllm.entrypoints.scale_out.token_in_token_out.protocol import MultiModalFeatures
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from serving.errors import InvalidRequest, TransferParamsRefused, Unsupported

SAMPLING_NAMES = frozenset(name for name in SamplingParams.__struct_fields__ if not name.startswith("_"))


class GenerateRequest(BaseModel):
    """One prompt in exactly one of three forms: `prompt`, `messages` or `token_ids`."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    model: str | None = Field(None, description="A served model's name. May be left out where only one is served.")
    prompt: str | None = Field(
        None,
        description="What the user says. Rendered as a single user message where the model has a chat template, "
        "with the images ahead of the text; taken as raw text otherwise.",
    )
    images: list[str] = Field(
        default=[], description="With `prompt`: data URLs, http(s) URLs of allowed hosts, or plain base64."
    )
    messages: list[dict[str, Any]] | None = Field(None, description="A conversation in OpenAI's form, media included.")
    token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, description="A prompt already rendered, as `/v1/chat/completions/render` answers it."
    )
    features: MultiModalFeatures | None = Field(
        None,
        description="With `token_ids`: the multimodal items, as in `/inference/v1/generate`. What each must bring is "
        "the model's admission policy.",
    )
    ec_transfer_params: dict[str, Any] | None = Field(
        None, description="With `features`: references to encodings, `{identifier: {'ref': ...}}`."
    )
    kv_transfer_params: Any = Field(None, description="Refused: servers alone may set it.")
    sampling_params: SamplingParams = Field(
        default_factory=lambda: SamplingParams(max_tokens=None),
        description="vLLM's sampling parameters by their own names. `max_tokens` defaults to what fits the context.",
    )
    stream: bool = Field(False, description="Answer with server-sent events.")
    return_references: bool = Field(
        False,
        description="Tell references to prefill's copies of the items' encodings. They expire within seconds, and name "
        "addresses inside the cluster.",
    )
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Keeps this tenant's caches apart from all others."
    )
    request_id: str | None = Field(None, min_length=1, max_length=256, description="Must not be in use.")
    priority: int = Field(0, ge=-(2**63), le=2**63 - 1, description="Lower runs earlier.")

    @field_validator("sampling_params", mode="wrap")
    @classmethod
    def _checked_sampling(cls, value: Any, convert: ValidatorFunctionWrapHandler) -> SamplingParams:
        """vLLM's own conversion, which skips unknown names and raises errors that pydantic does not know."""
        if isinstance(value, dict):
            unknown = sorted(set(value) - SAMPLING_NAMES)
            if unknown:
                raise InvalidRequest("no such sampling parameter", param=f"sampling_params.{unknown[0]}")
            value = {"max_tokens": None, **value}
        try:
            params: SamplingParams = convert(value)
        except VLLMValidationError as error:
            param = f"sampling_params.{error.parameter}" if error.parameter else "sampling_params"
            raise InvalidRequest(error.args[0], param=param) from error
        return params

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        """Judged here and not in a handler, so that HTTP and handle callers meet the same rules."""
        given = [name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise InvalidRequest(
                f"give exactly one of prompt, messages and token_ids; got {got}", param=given[1] if given else "prompt"
            )
        if not getattr(self, given[0]):
            raise InvalidRequest(f"{given[0]} is empty", param=given[0])
        if self.images and self.prompt is None:
            raise InvalidRequest("images go with prompt; put them into messages or features", param="images")
        for name in ("features", "ec_transfer_params"):
            if getattr(self, name) is not None and self.token_ids is None:
                raise InvalidRequest(f"{name} goes with token_ids", param=name)
        if self.kv_transfer_params is not None:
            raise TransferParamsRefused("kv_transfer_params is set by the servers only", param="kv_transfer_params")
        if self.sampling_params.n != 1:
            raise Unsupported("one answer a request; /v1/chat/completions has n", param="sampling_params.n")
        return self


class Item(BaseModel):
    """One multimodal item and where the encoding that was used came from."""

    identifier: str
    modality: str
    provenance: str


class Stages(BaseModel):
    """Milliseconds. `first_token` and `total` count from arrival; `ec_transfer` is part of `prefill`."""

    render: float
    encode: float
    ec_transfer: float
    prefill: float
    first_token: float
    decode: float
    total: float


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    cached_tokens: int = Field(description="Prompt tokens that prefill's prefix cache already held.")


class LogprobEntry(BaseModel):
    token_id: int
    logprob: float
    rank: int | None
    decoded: str | None


Logprobs = list[list[LogprobEntry] | None]


class GenerateResponse(BaseModel):
    """The whole answer; also the last event of a stream, where `text` and `token_ids` are that event's share."""

    id: str
    model: str
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    usage: Usage
    stages: Stages
    items: list[Item]
    ec_transfer_params: dict[str, Any] | None = Field(
        None,
        description="With `return_references`: a reference by identifier, in the form in which a later request with "
        "`token_ids` may bring it.",
    )


class GenerateDelta(BaseModel):
    """One event of a stream before the last."""

    id: str
    model: str
    text: str
    token_ids: list[int]
    finish_reason: None = None
    logprobs: Logprobs | None = None


class ErrorDetail(BaseModel):
    message: str
    type: str = Field(description="A stable code such as `feature_data_required`.")
    param: str | None = Field(description="The field at fault.")
    code: int = Field(description="The HTTP status.")
    hashes: list[str] = Field(description="Identifiers of the items concerned.")
    retryable: bool


class ErrorBody(BaseModel):
    """Every error of every route."""

    error: ErrorDetail
    type: Literal["error"] | None = Field(None, description="Only on /v1/messages.")


def parse_request(request: GenerateRequest | dict[str, Any]) -> GenerateRequest:
    """A checked request from a handle caller's object or dict.

    Raises:
        TriptychError: It does not validate; `param` names the field. Permanent.
    """
    if isinstance(request, GenerateRequest):
        return request
    try:
        return GenerateRequest.model_validate(request)
    except ValidationError as error:
        first = telling(error.errors(include_input=False, include_url=False))[0]
        raise InvalidRequest(first["msg"], param=clean_loc_for_param(first["loc"]) or None) from error


def telling(errors: Sequence[Any]) -> list[Any]:
    """Validation errors without those that only say that plain data is not yet an object of vLLM's."""
    return [error for error in errors if error["type"] != "is_instance_of"] or list(errors)
