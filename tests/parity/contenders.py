"""The two servers that must answer alike, each with the clients that users have."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import yaml

from benchmarks.servers import aggregated
from configs.schema import load
from tests.parity.compare import OWN, differences
from tests.serving_process import application, small_model

MODEL = "tiny-qwen2-vl"
_TIMEOUT_S = 180.0

FLAGS = (
    "enable-scale-out",
    "enable-prompt-tokens-details",
    "enable-auto-tool-choice",
    "trust-request-mm-kwargs",
    "trust-request-chat-template",
)
"""What the pipeline's front is started with too: without these, routes and fields are missing on the other side."""


@dataclass(frozen=True)
class Contender:
    """One server."""

    name: str
    http: httpx.Client
    openai: openai.OpenAI
    anthropic: anthropic.Anthropic


Ask = Callable[[Contender], Any]


@dataclass(frozen=True)
class Both:
    """The pipeline, and one engine behind vLLM's own server with the same settings."""

    ours: Contender
    theirs: Contender

    def same(self, ask: Ask, *, ignored: Collection[str] = ()) -> Any:
        """Ask both. Both must answer, and the same, but for fields of the `ignored` names. Returns our answer."""
        expected = ask(self.theirs)
        got = ask(self.ours)
        found = differences(got, expected, ignored=OWN.union(ignored))
        assert not found, "\n".join(["pipeline / vLLM:", *found])
        return got


@contextmanager
def both(folder: Path) -> Iterator[Both]:
    """Start both servers, and stop them."""
    model = small_model(
        MODEL,
        limit_mm_per_prompt={"image": 4, "video": 1},
        tool_call_parser="hermes",
        trust_request_mm_kwargs=True,
        trust_request_chat_template=True,
    )
    (folder / "model.yaml").write_text(yaml.safe_dump({"models": [model]}))
    config = load(folder / "model.yaml")
    with ExitStack() as stack:
        pipeline = stack.enter_context(application(folder, model))
        engine = stack.enter_context(aggregated(config, flags=FLAGS))
        engine.await_ready()
        yield Both(
            stack.enter_context(_contender("pipeline", pipeline.pipeline.url)),
            stack.enter_context(_contender("vLLM", engine.url)),
        )


@contextmanager
def running(ours: str, theirs: str) -> Iterator[Both]:
    """Servers that somebody else started, by their URLs."""
    with _contender("pipeline", ours) as pipeline, _contender("vLLM", theirs) as engine:
        yield Both(pipeline, engine)


@contextmanager
def _contender(name: str, url: str) -> Iterator[Contender]:
    with (
        httpx.Client(base_url=url, timeout=_TIMEOUT_S) as http,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=_TIMEOUT_S, max_retries=0) as to_openai,
        anthropic.Anthropic(base_url=url, api_key="none", timeout=_TIMEOUT_S, max_retries=0) as to_anthropic,
    ):
        yield Contender(name, http, to_openai, to_anthropic)
