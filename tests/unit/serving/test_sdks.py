"""The front as OpenAI's and Anthropic's own clients see it."""

from collections.abc import AsyncIterator

import anthropic
import httpx
import httpx2  # Anthropic's SDK takes no client of the first version
import openai
import pytest

from serving.errors import FeatureDataRequired, HandoffExpired
from serving.gate import ASGIApp
from tests.unit.serving.front_fakes import FakePipeline, data_url

MODEL = "tiny-qwen2-vl"


@pytest.fixture
def openai_client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url="http://front/v1", api_key="none", http_client=http, max_retries=0)


@pytest.fixture
async def anthropic_client(app: ASGIApp) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://front") as http:
        yield anthropic.AsyncAnthropic(base_url="http://front", api_key="none", http_client=http, max_retries=0)


async def test_openai_chat(openai_client: openai.AsyncOpenAI, pipeline: FakePipeline) -> None:
    answer = await openai_client.chat.completions.create(
        model=MODEL,
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what?"},
                    {"type": "image_url", "image_url": {"url": data_url(31)}},
                ],
            }
        ],
    )
    assert answer.choices[0].message.content == "Hello"
    assert len(pipeline.requests[0].features) == 1


async def test_openai_streams(openai_client: openai.AsyncOpenAI) -> None:
    chat = await openai_client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat]) == "Hello"
    events = [event.type async for event in await openai_client.responses.create(model=MODEL, input="hi", stream=True)]
    assert (events[0], events[-1]) == ("response.created", "response.completed")


async def test_openai_refusals(openai_client: openai.AsyncOpenAI, pipeline: FakePipeline) -> None:
    pipeline.error, pipeline.error_args = FeatureDataRequired, {"param": "features.image[0]"}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            await openai_client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=stream
            )
        assert (caught.value.type, caught.value.param) == ("feature_data_required", "features.image[0]")
        with pytest.raises(openai.BadRequestError):
            await openai_client.responses.create(model=MODEL, input="hi", stream=stream)


async def test_openai_errors_within_a_stream(openai_client: openai.AsyncOpenAI, pipeline: FakePipeline) -> None:
    pipeline.error, pipeline.fail_after = HandoffExpired, 1
    chat = await openai_client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    with pytest.raises(openai.APIError, match="refused by the test"):
        async for _ in chat:
            pass
    responses = await openai_client.responses.create(model=MODEL, input="hi", stream=True)
    with pytest.raises(openai.APIError, match="refused by the test"):
        async for _ in responses:
            pass


async def test_anthropic_messages(anthropic_client: anthropic.AsyncAnthropic) -> None:
    answer = await anthropic_client.messages.create(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hi"}]
    )
    assert answer.content[0].type == "text"
    assert answer.content[0].text == "Hello"
    async with anthropic_client.messages.stream(
        model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hi"}]
    ) as stream:
        assert await stream.get_final_text() == "Hello"


async def test_anthropic_refusals(anthropic_client: anthropic.AsyncAnthropic, pipeline: FakePipeline) -> None:
    pipeline.error = FeatureDataRequired
    with pytest.raises(anthropic.BadRequestError):
        await anthropic_client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hi"}])
    pipeline.error, pipeline.fail_after = HandoffExpired, 1
    with pytest.raises(anthropic.APIError, match="refused by the test"):
        async with anthropic_client.messages.stream(
            model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            await stream.get_final_text()
