"""Running pipelines that the tests of this folder share, one model at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pipeline.driver import driver
from tests.pipeline.served import MODELS, Served
from tests.serving_process import application, small_model, small_stage


@pytest.fixture(scope="session", params=MODELS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    # The receiver cache holds three items, so that it can be made to forget. Batches are small, so that a late item
    # lies beyond the first prefill chunk.
    sizes = {"max_num_batched_tokens": 512}
    stages = {
        "encoder": small_stage(**sizes),
        "prefill": small_stage(receiver_cache_bytes="16KiB", **sizes),
        "decode": small_stage(**sizes),
    }
    model = small_model(request.param, **stages)
    with application(tmp_path_factory.mktemp("admission"), model) as app, driver(app.pipeline) as handles:
        yield Served(app, handles, request.param)


@pytest.fixture
def one_of_each_kind(served: Served, request: pytest.FixtureRequest) -> None:
    """Unless asked for all: the contract tests of one model with M-RoPE and of one without."""
    if served.model == "tiny-qwen2-vl" and not request.config.getoption("whole_matrix"):
        pytest.skip("tiny-qwen3-vl stands for models with M-RoPE; --whole-matrix runs both")
