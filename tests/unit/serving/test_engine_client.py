import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind, SamplingParams

from serving.engine_client import PipelineClient
from serving.engine_input import decode_sampling
from serving.errors import (
    DuplicateRequest,
    EngineFault,
    InvalidRequest,
    Overloaded,
    TransferParamsRefused,
    TriptychError,
    Unsupported,
)
from serving.gated import Refused
from serving.naming import ItemNames
from serving.protocol import DecodeChunk, TokenLogprob
from serving.references import ReferenceSigner
from serving.render import ModelFront
from serving.stages import Report
from tests.fakes import ref_for
from tests.unit.serving.front_fakes import FakePipeline, genuine, healthy

PROMPT = tokens_input([40, 41, 42], cache_salt="tenant")


@pytest.fixture
def client(model_front: Callable[[str], ModelFront], pipeline: FakePipeline) -> PipelineClient:
    return PipelineClient(
        model_front("tiny-qwen2-vl"), pipeline, ItemNames("tiny", genuine), request_timeout_s=9.0, check_stages=healthy
    )


async def outputs_of(client: PipelineClient, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in client.generate(PROMPT, params, "request", **options)]


async def refusal_of(
    client: PipelineClient, params: SamplingParams, prompt: Any = PROMPT, **options: Any
) -> TriptychError:
    with pytest.raises(TriptychError) as caught:
        async for _ in client.run(prompt, params, "request", **options):
            pass
    return caught.value


async def test_deltas_pass_through(client: PipelineClient) -> None:
    outputs = await outputs_of(client, SamplingParams(output_kind=RequestOutputKind.DELTA))
    assert [output.outputs[0].text for output in outputs] == ["Hel", "lo"]
    assert [list(output.outputs[0].token_ids) for output in outputs] == [[72], [105]]
    assert [output.finished for output in outputs] == [False, True]
    assert outputs[1].outputs[0].finish_reason == "stop"
    assert outputs[0].request_id == "request"
    assert outputs[0].prompt_token_ids == [40, 41, 42]
    assert outputs[0].num_cached_tokens == 3
    assert outputs[0].num_cache_creation_tokens == 2


async def test_cumulative_outputs_grow(client: PipelineClient) -> None:
    outputs = await outputs_of(client, SamplingParams(output_kind=RequestOutputKind.CUMULATIVE))
    assert [output.outputs[0].text for output in outputs] == ["Hel", "Hello"]
    assert list(outputs[1].outputs[0].token_ids) == [72, 105]


async def test_the_final_output_alone(client: PipelineClient, pipeline: FakePipeline) -> None:
    last = DecodeChunk("lo", (105,), finished=True, finish_reason="length", weight_version="default")
    pipeline.chunks = (DecodeChunk("Hel", (72,), finished=False), last)
    (output,) = await outputs_of(client, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))
    assert output.finished
    assert output.outputs[0].weight_versions == [WeightVersionSpan("default", 0, 2)]
    assert output.outputs[0].text == "Hello"
    assert decode_sampling(pipeline.requests[0].sampling).output_kind is RequestOutputKind.FINAL_ONLY


async def test_what_the_pipeline_is_asked(client: PipelineClient, pipeline: FakePipeline) -> None:
    params = SamplingParams(temperature=0.5, stop=["x"], extra_args={"mine": 1})
    await outputs_of(client, params, priority=4, reasoning_ended=True, reasoning_parser_kwargs={"a": {}})
    (request,) = pipeline.requests
    assert request.request_id.startswith("request-")
    assert request.token_ids == (40, 41, 42)
    assert request.cache_salt == "tenant"
    assert request.timeout_s == 9.0
    assert (request.priority, request.reasoning_ended, request.reasoning_parser_kwargs) == (4, True, {"a": {}})
    sent = decode_sampling(request.sampling)
    assert (sent.temperature, sent.stop, sent.extra_args) == (0.5, ["x"], {"mine": 1})
    assert params.extra_args == {"mine": 1}  # the caller's object is its own


async def test_open_ended_requests_are_bounded_by_the_context(client: PipelineClient, pipeline: FakePipeline) -> None:
    await outputs_of(client, SamplingParams(max_tokens=None))
    assert decode_sampling(pipeline.requests[0].sampling).max_tokens == 512 - 3


@pytest.mark.parametrize("kind", list(RequestOutputKind))
async def test_n_answers_are_n_requests(
    client: PipelineClient, pipeline: FakePipeline, kind: RequestOutputKind
) -> None:
    outputs = await outputs_of(client, SamplingParams(n=3, seed=10, output_kind=kind))
    sent = [decode_sampling(request.sampling) for request in pipeline.requests]
    assert [(params.n, params.seed) for params in sent] == [(1, 10), (1, 11), (1, 12)]
    assert len({request.request_id for request in pipeline.requests}) == 3
    assert outputs[-1].finished
    assert not any(output.finished for output in outputs[:-1])
    texts = dict.fromkeys(range(3), "")
    for output in outputs:
        for choice in output.outputs:
            texts[choice.index] = (
                choice.text if kind is not RequestOutputKind.DELTA else texts[choice.index] + choice.text
            )
    assert texts == {0: "Hello", 1: "Hello", 2: "Hello"}
    if kind is RequestOutputKind.FINAL_ONLY:
        assert len(outputs) == 1
        assert [choice.index for choice in outputs[0].outputs] == [0, 1, 2]


async def test_logprobs_come_in_vllms_form(client: PipelineClient, pipeline: FakePipeline) -> None:
    entry = TokenLogprob(72, -0.5, 2, "Hel")
    pipeline.chunks = (
        DecodeChunk(
            "Hel", (72,), finished=False, cumulative_logprob=-0.5, logprobs=((entry, TokenLogprob(9, -0.1, 1)),)
        ),
        DecodeChunk("lo", (105,), finished=True, finish_reason="stop", logprobs=((TokenLogprob(105, -1.0, 1),),)),
    )
    pipeline.prompt_logprobs = (None, (TokenLogprob(41, -3.0, 7, "x"),))
    outputs = await outputs_of(client, SamplingParams(logprobs=1, output_kind=RequestOutputKind.DELTA))
    first = outputs[0].outputs[0]
    assert first.logprobs is not None
    assert list(first.logprobs[0]) == [72, 9]
    assert (first.logprobs[0][72].logprob, first.logprobs[0][72].rank, first.logprobs[0][72].decoded_token) == (
        -0.5,
        2,
        "Hel",
    )
    assert first.cumulative_logprob == -0.5
    assert outputs[0].prompt_logprobs is not None
    assert outputs[0].prompt_logprobs[0] is None
    assert outputs[0].prompt_logprobs[1][41].rank == 7
    assert outputs[1].prompt_logprobs is None  # told once in a stream of deltas
    (last,) = [o for o in await outputs_of(client, SamplingParams(logprobs=1)) if o.finished]
    assert len(last.outputs[0].logprobs or []) == 2
    assert last.prompt_logprobs is not None


async def test_stop_reasons_pass(client: PipelineClient, pipeline: FakePipeline) -> None:
    pipeline.chunks = (DecodeChunk("a", (1,), finished=True, finish_reason="stop", stop_reason="xx"),)
    (output,) = await outputs_of(client, SamplingParams())
    assert output.outputs[0].stop_reason == "xx"


async def test_errors_reach_vllm_with_their_status(client: PipelineClient, pipeline: FakePipeline) -> None:
    pipeline.error = Overloaded
    with pytest.raises(Refused) as caught:
        await outputs_of(client, SamplingParams())
    assert caught.value.status_code == 503
    assert isinstance(caught.value.__cause__, Overloaded)


async def test_a_fault_of_the_pipeline_is_named_as_one(client: PipelineClient, pipeline: FakePipeline) -> None:
    pipeline.error, pipeline.error_args = InvalidRequest, {"no_such_argument": 1}  # makes the fake raise TypeError
    error = await refusal_of(client, SamplingParams())
    assert isinstance(error, EngineFault)
    assert isinstance(error.__cause__, TypeError)


async def test_a_stream_that_ends_early_is_a_fault(client: PipelineClient, pipeline: FakePipeline) -> None:
    pipeline.chunks = (DecodeChunk("Hel", (72,), finished=False),)
    assert isinstance(await refusal_of(client, SamplingParams()), EngineFault)


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(logprobs=10_000), "logprobs"),
        (SamplingParams(logit_bias={10_000_000: 1.0}), "logit_bias"),
        (SamplingParams(allowed_token_ids=[10_000_000]), "allowed_token_ids"),
    ],
)
async def test_parameters_that_an_engine_would_refuse_never_reach_a_stage(
    client: PipelineClient, pipeline: FakePipeline, params: SamplingParams, param: str
) -> None:
    error = await refusal_of(client, params)
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    assert not pipeline.requests


async def test_prompts_beyond_the_context_never_reach_a_stage(client: PipelineClient, pipeline: FakePipeline) -> None:
    error = await refusal_of(client, SamplingParams(), tokens_input([40] * 600))
    assert isinstance(error, InvalidRequest)
    error = await refusal_of(client, SamplingParams(), tokens_input([10_000_000]))
    assert isinstance(error, InvalidRequest)
    assert not pipeline.requests


@pytest.mark.parametrize("value", [{}, None, {"do_remote_prefill": True}, "text"])
async def test_kv_transfer_parameters_are_refused_in_any_form(client: PipelineClient, value: Any) -> None:
    error = await refusal_of(client, SamplingParams(extra_args={"kv_transfer_params": value}))
    assert isinstance(error, TransferParamsRefused)
    assert error.param == "kv_transfer_params"


async def test_references_are_taken_out_of_the_parameters(client: PipelineClient, pipeline: FakePipeline) -> None:
    signer = ReferenceSigner(b"0123456789abcdef", lifetime_s=60.0, peer_networks=["127.0.0.0/8"])
    ref = signer.sign(ref_for("abc"), metadata={}, cache_salt=None)
    fields = {name: getattr(ref, name) for name in ref.__struct_fields__}
    entry = {"ref": fields, "metadata": {"image_grid_thw": [[1, 2, 2]]}, "item_indices": [0]}
    sent = {"abc": entry, "unreferenced": {"metadata": {}, "item_indices": [1]}}
    await outputs_of(client, SamplingParams(extra_args={"ec_transfer_params": sent, "mine": 1}))
    (request,) = pipeline.requests
    assert request.refs == {"abc": ref, "unreferenced": None}
    assert decode_sampling(request.sampling).extra_args == {"mine": 1}


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ("text", "ec_transfer_params"),
        ([1], "ec_transfer_params"),
        ({"abc": 1}, "ec_transfer_params.abc"),
        ({"abc": {"peer_host": "10.0.0.1", "peer_port": 1}}, "ec_transfer_params.abc"),
        ({"abc": {"ref": {"identifier": "abc"}}}, "ec_transfer_params.abc"),
        ({"abc": {"ref": {}, "more": 1}}, "ec_transfer_params.abc"),
    ],
)
async def test_references_of_another_shape_are_refused(client: PipelineClient, value: Any, param: str) -> None:
    error = await refusal_of(client, SamplingParams(extra_args={"ec_transfer_params": value}))
    assert isinstance(error, InvalidRequest)
    assert error.param == param


async def test_a_reference_under_another_items_name_is_refused(client: PipelineClient) -> None:
    fields = {name: getattr(ref_for("abc"), name) for name in ref_for("abc").__struct_fields__}
    error = await refusal_of(client, SamplingParams(extra_args={"ec_transfer_params": {"other": {"ref": fields}}}))
    assert error.param == "ec_transfer_params.other.ref.identifier"


async def test_what_this_front_cannot_do_is_said(client: PipelineClient) -> None:
    lora = LoRARequest("adapter", 1, "/nowhere")
    assert isinstance(await refusal_of(client, SamplingParams(), lora_request=lora), Unsupported)
    assert isinstance(await refusal_of(client, SamplingParams(), data_parallel_rank=0), Unsupported)
    assert isinstance(await refusal_of(client, SamplingParams(), {"prompt": "raw text"}), Unsupported)
    with pytest.raises(Unsupported):
        client.encode()
    for control in (client.sleep, client.resume_generation, client.reset_prefix_cache, client.stop_profile):
        with pytest.raises(Unsupported):
            await control()


async def test_an_id_in_use_is_refused(client: PipelineClient, pipeline: FakePipeline) -> None:
    pipeline.pause = asyncio.Event()
    async with aclosing(client.run(PROMPT, SamplingParams(), "request")) as running:
        await anext(running)
        error = await refusal_of(client, SamplingParams())
        assert isinstance(error, DuplicateRequest)
    pipeline.pause.set()
    assert await outputs_of(client, SamplingParams())  # free again


async def test_leaving_closes_the_pipelines_stream(client: PipelineClient, pipeline: FakePipeline) -> None:
    pipeline.pause = asyncio.Event()
    task = asyncio.ensure_future(outputs_of(client, SamplingParams(n=3)))
    await pipeline.paused.wait()
    assert pipeline.running > 0
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pipeline.running == 0


async def test_an_abort_ends_the_answer_where_it_stands(client: PipelineClient, pipeline: FakePipeline) -> None:
    pipeline.pause = asyncio.Event()
    task = asyncio.ensure_future(outputs_of(client, SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, n=2)))
    await pipeline.paused.wait()
    await client.abort(["request", "another"])
    (output,) = await task
    assert output.finished
    assert [choice.finish_reason for choice in output.outputs] == ["abort", "abort"]
    assert output.outputs[0].text == "Hel"
    assert pipeline.running == 0


async def test_the_report_comes_first_and_once(client: PipelineClient) -> None:
    events = [event async for event in client.run(PROMPT, SamplingParams(n=2), "request")]
    assert [isinstance(event, Report) for event in events] == [True] + [False] * (len(events) - 1)
