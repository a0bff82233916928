"""The built-in checkpoints answer held-out pictures through a real vLLM engine."""

import gc

import pytest

from models import evaluate, registry

pytestmark = pytest.mark.engine

_PICTURES = 40


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_built_in_model_names_what_it_sees(name: str) -> None:
    llm = evaluate.engine(registry.PREFIX + name)
    try:
        tasks = evaluate.held_out(_PICTURES, square=name == "tiny-llava")
        shares = {task: evaluate.accuracy(llm, cases) for task, cases in tasks.items()}
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
    assert all(share >= 0.95 for share in shares.values()), shares
