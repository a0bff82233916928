from collections.abc import Callable

import pytest
from vllm.multimodal.cache import MultiModalProcessorOnlyCache

from serving.engine_input import features_of
from serving.protocol import Metadata
from serving.render import FrontModel, ModelFront, _arguments
from tests.unit.serving.test_engine_input import render


def test_processed_media_stay_in_this_process(model_front: Callable[[str], ModelFront]) -> None:
    """The default cache would drop tensors that it believes the engine has."""
    front = model_front("tiny-qwen2-vl")
    assert type(front.renderer.mm_processor_cache) is MultiModalProcessorOnlyCache
    first, second = (render(front, [11]) for _ in range(2))
    assert first["mm_hashes"] == second["mm_hashes"]
    assert second["mm_kwargs"]["image"][0] is not None


def test_hashes_name_the_content(model_front: Callable[[str], ModelFront]) -> None:
    front = model_front("tiny-llava")
    one, other = (render(front, [seed])["mm_hashes"]["image"][0] for seed in (12, 13))
    assert one != other
    assert len(one) == 64


@pytest.mark.parametrize(
    ("model", "fields"),
    [("tiny-qwen2-vl", {"image_grid_thw"}), ("tiny-qwen3-vl", {"image_grid_thw"}), ("tiny-llava", set())],
)
def test_metadata_fields_are_the_models(model_front: Callable[[str], ModelFront], model: str, fields: set[str]) -> None:
    assert set(model_front(model).metadata_fields("image")) == fields
    assert model_front(model).has_chat_template


async def test_embedding_inputs_may_bring_metadata_alone(model_front: Callable[[str], ModelFront]) -> None:
    """What a vLLM client sends that has the encoding elsewhere; refused without a consumer role."""
    import torch
    from vllm.renderers.params import ChatParams
    from vllm.utils.serial_utils import tensor2base64

    front = model_front("tiny-qwen2-vl")
    grid = tensor2base64(torch.tensor([1, 4, 4]))
    content = [{"type": "image_embeds", "image_embeds": {"image_grid_thw": grid}, "uuid": "mine"}]
    _, (prompt,) = await front.renderer.render_chat_async(
        [[{"role": "user", "content": content}]], ChatParams(chat_template_kwargs={"add_generation_prompt": True})
    )
    (feature,) = features_of(prompt, front.metadata_fields)
    assert feature.payload == Metadata({"image_grid_thw": [1, 4, 4]})
    assert feature.identifier == "mine"
    assert feature.placeholder.length == 4


def test_sizes_are_the_stages(model_front: Callable[[str], ModelFront]) -> None:
    front = model_front("tiny-qwen2-vl")
    assert front.input_processor.mm_encoder_cache_size == 2048
    assert front.vllm_config.scheduler_config.max_num_seqs == 32
    assert front.vllm_config.model_config.max_model_len == 512


def test_values_cannot_become_options() -> None:
    """A value is one word with its option, whatever it looks like."""
    arguments = _arguments(FrontModel(name="--api-key=x", checkpoint="/nowhere", chat_template="--port=1"))
    assert arguments.served_model_name == ["--api-key=x"]
    assert arguments.chat_template == "--port=1"
    assert not arguments.api_key
