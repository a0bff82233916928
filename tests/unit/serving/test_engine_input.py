from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from vllm.inputs import mm_input, tokens_input
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from serving.engine_input import (
    decode_item,
    decode_sampling,
    encode_item,
    encode_sampling,
    features_of,
    metadata_item,
    to_engine_input,
)
from serving.errors import InvalidFeature, InvalidRequest, Unsupported
from serving.protocol import Feature, Metadata, Placeholder, TensorInfo, Tensors
from serving.render import ModelFront
from tests.unit.serving.front_fakes import png


def render(front: ModelFront, seeds: list[int], text: str = "what is it?") -> Any:
    """A prompt with pictures as vLLM's renderer makes it."""
    import io

    from PIL import Image
    from vllm.renderers.params import ChatParams

    content: list[dict[str, Any]] = [
        {"type": "image_pil", "image_pil": Image.open(io.BytesIO(png(seed)))} for seed in seeds
    ]
    message = {"role": "user", "content": [*content, {"type": "text", "text": text}]}
    _, (rendered,) = front.renderer.render_chat(
        [[message]], ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    )
    return rendered


def assert_same_items(got: MultiModalKwargsItem, wanted: MultiModalKwargsItem) -> None:
    assert got.keys() == wanted.keys()
    for key, elem in wanted.items():
        assert type(got[key].field) is type(elem.field)
        assert got[key].field.keep_on_cpu == elem.field.keep_on_cpu
        assert got[key].data.dtype == elem.data.dtype
        assert torch.equal(got[key].data, elem.data)


@pytest.mark.parametrize("model", ["tiny-qwen2-vl", "tiny-llava", "tiny-qwen3-vl"])
def test_a_rendered_prompt_survives_the_wire(model_front: Callable[[str], ModelFront], model: str) -> None:
    front = model_front(model)
    prompt = render(front, [1, 2])
    features = features_of(prompt, front.metadata_fields)
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(features), type=tuple[Feature, ...])
    back = to_engine_input(prompt["prompt_token_ids"], wire, cache_salt="tenant")
    assert back["type"] == "multimodal"
    assert back["cache_salt"] == "tenant"
    assert back["prompt_token_ids"] == prompt["prompt_token_ids"]
    assert back["mm_hashes"] == prompt["mm_hashes"]
    assert back["mm_placeholders"] == prompt["mm_placeholders"]
    for got, wanted in zip(back["mm_kwargs"]["image"], prompt["mm_kwargs"]["image"], strict=True):
        assert_same_items(got, wanted)


def test_metadata_is_what_the_model_declares(model_front: Callable[[str], ModelFront]) -> None:
    qwen, llava = (render(model_front(name), [1]) for name in ("tiny-qwen2-vl", "tiny-llava"))
    (feature,) = features_of(qwen, model_front("tiny-qwen2-vl").metadata_fields)
    assert isinstance(feature.payload, Tensors)
    grid = qwen["mm_kwargs"]["image"][0]["image_grid_thw"].data
    assert feature.payload.metadata == {"image_grid_thw": grid.tolist()}
    assert feature.payload.info["image_grid_thw"] == TensorInfo((3,), "int64")
    (feature,) = features_of(llava, model_front("tiny-llava").metadata_fields)
    assert isinstance(feature.payload, Tensors)
    assert feature.payload.metadata == {}


def test_metadata_alone_makes_an_item_of_those_fields(model_front: Callable[[str], ModelFront]) -> None:
    prompt = render(model_front("tiny-qwen2-vl"), [1])
    (feature,) = features_of(prompt)
    assert isinstance(feature.payload, Tensors)
    bare = msgspec.structs.replace(feature, payload=Metadata(feature.payload.metadata))
    (item,) = to_engine_input(prompt["prompt_token_ids"], [bare])["mm_kwargs"]["image"]
    original = prompt["mm_kwargs"]["image"][0]["image_grid_thw"]
    assert list(item) == ["image_grid_thw"]
    assert torch.equal(item["image_grid_thw"].data, original.data)
    assert item["image_grid_thw"].data.dtype == original.data.dtype
    assert item["image_grid_thw"].field == original.field
    assert features_of(to_engine_input(prompt["prompt_token_ids"], [bare])) == (bare,)


def test_a_name_alone_makes_no_item() -> None:
    feature = Feature("image", "abc", Placeholder(1, 2))
    prompt = to_engine_input([1, 2, 3], [feature])
    assert prompt["mm_kwargs"]["image"] == [None]
    assert features_of(prompt) == (feature,)


def test_masks_modalities_and_prompt_order() -> None:
    features = (
        Feature("video", "v", Placeholder(1, 3, (True, False, True)), Metadata({"grid": [[1, 2]]})),
        Feature("image", "a", Placeholder(5, 1)),
        Feature("image", "b", Placeholder(7, 1)),
    )
    prompt = to_engine_input(range(9), features)
    assert prompt["mm_placeholders"]["video"][0].get_num_embeds() == 2
    assert prompt["mm_hashes"] == {"video": ["v"], "image": ["a", "b"]}
    assert features_of(prompt) == features


def test_text_prompts_have_no_features() -> None:
    prompt = to_engine_input([1, 2], [], cache_salt="s")
    assert prompt == tokens_input([1, 2], cache_salt="s")
    assert features_of(prompt) == ()


def test_embedding_prompts_are_refused() -> None:
    with pytest.raises(Unsupported):
        features_of({"type": "embeds", "prompt_embeds": torch.zeros(1, 2)})


def test_nested_tensors_are_named_one_by_one() -> None:
    field = MultiModalFlatField(slices=[slice(0, 1)])
    item = MultiModalKwargsItem(
        {"crops": MultiModalFieldElem(data=[torch.zeros(2, 3), torch.zeros(1, 3)], field=field)}
    )
    tensors = encode_item(item)
    assert tensors.info == {"crops[0]": TensorInfo((2, 3), "float32"), "crops[1]": TensorInfo((1, 3), "float32")}
    assert [t.shape for t in decode_item(tensors)["crops"].data] == [(2, 3), (1, 3)]


def test_large_bfloat16_tensors_are_exact() -> None:
    data = torch.randn(64, 64).to(torch.bfloat16)
    item = MultiModalKwargsItem({"pixels": MultiModalFieldElem(data=data, field=MultiModalBatchedField())})
    tensors = encode_item(item)
    assert len(tensors.frames) == 2  # the tensor travels out of band
    back = decode_item(tensors)["pixels"].data
    assert torch.equal(back, data)
    back[0, 0] = 0.0  # decoded tensors own their memory


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (b"",),
        (b"\xff\xff",),
        (msgspec.msgpack.encode({"x": {"data": ["float32", [4], 7], "field": ["batched", {"keep_on_cpu": False}]}}),),
        (msgspec.msgpack.encode({"x": {"data": ["__class__", [4], 0], "field": ["batched", {}]}}),),
        (msgspec.msgpack.encode({"x": {"data": None, "field": ["no_such_field", {}]}}),),
        (msgspec.msgpack.encode({"x": {"data": msgspec.msgpack.Ext(1, b"cos\nsystem\n"), "field": ["batched", {}]}}),),
        (msgspec.msgpack.encode([1, 2]),),
    ],
)
def test_frames_that_nobody_encoded_are_refused(frames: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    with pytest.raises(InvalidFeature):
        decode_item(Tensors(frames, {}, {}))


@pytest.mark.parametrize("value", ["text", [[1], [2, 3]], None, {"a": 1}, [None], 2**70])
def test_metadata_that_is_not_numbers_is_refused(value: Any) -> None:
    with pytest.raises(InvalidFeature) as caught:
        metadata_item({"grid": value})
    assert caught.value.param == "grid"


@pytest.mark.parametrize("value", [7, 0.1, True, [1, 2], [0.1, 0.2], [[1, 2], [3, 4]], [True, False]])
def test_metadata_reads_back_as_it_was(value: Any) -> None:
    assert metadata_item({"field": value})["field"].data.tolist() == value


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=None, temperature=0.0, seed=7, stop=["x", "yy"], stop_token_ids=[3, 3, 4]),
        SamplingParams(n=3, logprobs=2, prompt_logprobs=1, output_kind=RequestOutputKind.DELTA, bad_words=["no"]),
        SamplingParams(logit_bias={5: -1.0}, allowed_token_ids=[1, 2], extra_args={"a": [1, {"b": None}]}),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a", "b"])),
        SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"}), ignore_eos=True),
    ],
)
def test_sampling_parameters_survive_the_wire(params: SamplingParams) -> None:
    back = decode_sampling(encode_sampling(params))
    assert back == params
    assert encode_sampling(back) == encode_sampling(params)


def test_sampling_parameters_that_are_not_plain_data_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        encode_sampling(SamplingParams(extra_args={"f": object()}))


@pytest.mark.parametrize("data", [b"", b"\xc1", msgspec.msgpack.encode({"n": 0}), msgspec.msgpack.encode({"n": "x"})])
def test_bytes_that_are_no_sampling_parameters_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_sampling(data)
    assert caught.value.param == "sampling_params"


def test_an_item_the_renderer_gave_no_tensors_for_keeps_its_metadata() -> None:
    """A token-in client's `mm_metadata` arrives as an item of metadata fields only."""
    item = metadata_item({"image_grid_thw": [1, 2, 2]})
    prompt = mm_input(
        [1, 2, 3],
        MultiModalKwargsItems({"image": [item]}),
        {"image": ["a"]},
        {"image": [PlaceholderRange(offset=1, length=1)]},
    )
    (feature,) = features_of(prompt)
    assert feature.payload == Metadata({"image_grid_thw": [1, 2, 2]})
