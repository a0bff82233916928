"""Fronts of the built-in models, made once: tokenizers and processors take seconds to load."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

from tests.unit.serving.front_fakes import FakePipeline, genuine, healthy

if TYPE_CHECKING:
    from serving.front import Front
    from serving.gate import ASGIApp
    from serving.render import ModelFront

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


_OTHERS_WARNINGS = (
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning",  # torch, when it is imported
    "ignore:max_tokens is deprecated in favor of:DeprecationWarning",  # vLLM, reading its own request
)


def pytest_configure(config: pytest.Config) -> None:
    for line in _OTHERS_WARNINGS:
        config.addinivalue_line("filterwarnings", line)


@pytest.fixture(scope="session")
def model_front() -> Iterator[Callable[[str], ModelFront]]:
    """The front-end objects of a built-in checkpoint, by its short name."""
    from models.registry import resolve
    from serving.render import FrontModel, ModelFront

    made: dict[str, ModelFront] = {}

    def make(short: str) -> ModelFront:
        if short not in made:
            made[short] = ModelFront(
                FrontModel(
                    name=short,
                    checkpoint=resolve(f"builtin:{short}"),
                    max_model_len=512,
                    limit_mm_per_prompt={"image": 4, "video": 0},
                )
            )
        return made[short]

    yield make
    for front in made.values():
        front.renderer.shutdown()


@pytest.fixture(scope="session")
def shared_front(model_front: Callable[[str], ModelFront]) -> tuple[Front, FakePipeline]:
    """vLLM's application over a pipeline that `front` resets for each test."""
    from serving.front import Front
    from serving.media import AllowedHosts, install_media_connector

    install_media_connector(AllowedHosts((), max_bytes=1 << 20))
    pipeline = FakePipeline()
    front = asyncio.run(
        Front.build(
            model_front("tiny-qwen2-vl"), pipeline, request_timeout_s=60.0, check_stages=healthy, verify=genuine
        )
    )
    return front, pipeline


@pytest.fixture
def pipeline(shared_front: tuple[Front, FakePipeline]) -> FakePipeline:
    _, pipeline = shared_front
    pipeline.reset()
    return pipeline


@pytest.fixture
def front(shared_front: tuple[Front, FakePipeline]) -> Front:
    return shared_front[0]


@pytest.fixture
def app(front: Front, pipeline: FakePipeline) -> ASGIApp:
    """The whole ASGI stack, over a pipeline as new."""
    from serving.dispatch import Dispatcher
    from serving.gate import DisconnectGuard

    return DisconnectGuard(Dispatcher({front.name: front.served}))


@pytest.fixture
async def http(app: ASGIApp) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application, in this process."""
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
        yield client
