"""One model's whole front: vLLM's own FastAPI application over our engine client, and `/generate` beside its routes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.entrypoints.serve.exception_handling.handlers.validation import validation_exception_handler

from serving.dispatch import ServedModel
from serving.engine_client import TASKS, TOKEN_IN_ROUTE, Generator, PipelineClient
from serving.engine_input import MALFORMED, cache_miss
from serving.errors import ECReferenceRequired, InvalidFeature, InvalidRequest, TriptychError
from serving.gate import Gate, error_response
from serving.generate_api import GenerateService, generate_router
from serving.generate_prompts import PromptRenderer
from serving.generate_types import telling
from serving.naming import ItemNames
from serving.protocol import EncodingRef
from serving.render import ModelFront

_METADATA_ONLY = "metadata-only multimodal items require ec_transfer_params"
"""How vLLM's `/inference/v1/generate` says that metadata came without a reference."""


class Front:
    """One model, ready to serve: `app` for HTTP (behind the gate), `service` for callers in other processes.

    Build it with `build`, in the event loop that will serve it.
    """

    def __init__(
        self, name: str, client: PipelineClient, app: FastAPI, service: GenerateService, names: ItemNames
    ) -> None:
        self.name = name
        self.client = client
        self.service = service
        self.names = names
        self.fastapi = app
        self.app = Gate(app)

    @classmethod
    async def build(
        cls,
        front: ModelFront,
        pipeline: Generator,
        *,
        request_timeout_s: float | None,
        check_stages: Callable[[], Awaitable[None]],
        verify: Callable[[EncodingRef, str | None], bool],
    ) -> Front:
        """vLLM's application with our client in the engine's place.

        Args:
            front: The model's front-end objects.
            pipeline: Runs rendered requests.
            request_timeout_s: Deadline of one request over all stages; None means unlimited.
            check_stages: Raises a `TriptychError` when the model cannot be served now.
            verify: Whether a reference is genuine, unexpired and the tenant's.
        """
        names = ItemNames(front.model.name, verify)
        client = PipelineClient(front, pipeline, names, request_timeout_s=request_timeout_s, check_stages=check_stages)
        app = build_app(front.args, TASKS, client.model_config)
        await init_app_state(client, app.state, front.args, TASKS)
        app.state.server = SimpleNamespace()  # vLLM's handlers look for the uvicorn server that they could stop
        prompts = PromptRenderer(app.state.online_renderer, has_chat_template=front.has_chat_template)
        service = GenerateService(front.model.name, prompts, client)
        app.include_router(generate_router(service))
        app.exception_handler(TriptychError)(_our_error)
        app.exception_handler(RequestValidationError)(_invalid_body)
        for kind in MALFORMED:
            app.exception_handler(kind)(_malformed)
        # vLLM's SageMaker routes have built the stack already, with the handlers that were known then.
        app.middleware_stack = app.build_middleware_stack()
        return cls(front.model.name, client, app, service, names)

    @property
    def served(self) -> ServedModel:
        """What the dispatcher needs."""
        return ServedModel(self.app, self.client.check_health, self.names.rename_uuids)

    def close(self) -> None:
        self.client.shutdown()


async def _our_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TriptychError)
    status, headers, body = error_response(request.url.path, error)
    return Response(body, status_code=status, headers={name.decode(): value.decode() for name, value in headers})


async def _malformed(request: Request, error: Exception) -> Response:
    """vLLM decodes a token-in client's tensors without a check of its own: what that raises is the client's error."""
    if request.url.path.endswith(TOKEN_IN_ROUTE) and not isinstance(error, ValueError | TypeError):
        return await _our_error(
            request, InvalidFeature("a feature's data does not decode", param="features.kwargs_data")
        )
    miss = cache_miss(error)
    if miss is not None:
        return await _our_error(request, miss)
    answer: Response = await exception_handler(request, error)
    return answer


async def _invalid_body(request: Request, error: Exception) -> Response:
    """vLLM's reading of a body that does not validate, as one of our errors."""
    assert isinstance(error, RequestValidationError)
    answer = await validation_exception_handler(request, RequestValidationError(telling(error.errors())))
    detail: dict[str, Any] = json.loads(answer.body)["error"]
    param = detail["param"] and detail["param"].removeprefix("body.")
    kind = ECReferenceRequired if _METADATA_ONLY in detail["message"] else InvalidRequest
    return await _our_error(request, kind(detail["message"], param=param))
