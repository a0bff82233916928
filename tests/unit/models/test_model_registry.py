"""Names of built-in models resolve to complete checkpoints; other names pass through."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from models import registry

_REPOSITORY_LIMIT_BYTES = 5 << 20


@pytest.mark.parametrize("name", registry.NAMES)
def test_a_built_in_name_is_a_directory_with_everything_vllm_reads(name: str) -> None:
    directory = Path(registry.resolve(f"builtin:{name}"))
    files = {path.name for path in directory.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json", "README.md"} <= files
    assert sum(path.stat().st_size for path in directory.iterdir()) <= _REPOSITORY_LIMIT_BYTES


@pytest.mark.parametrize("name", registry.NAMES)
def test_weights_are_bfloat16(name: str) -> None:
    raw = (Path(registry.resolve(f"builtin:{name}")) / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    assert {entry["dtype"] for key, entry in header.items() if key != "__metadata__"} == {"BF16"}


def test_llava_weights_carry_the_names_vllm_looks_for() -> None:
    """vLLM skips names it does not know, and the tower then keeps its random weights."""
    raw = (Path(registry.resolve("builtin:tiny-llava")) / "model.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    tower = [key for key in header if "vision_tower." in key]
    assert tower
    assert all("vision_tower.vision_model." in key for key in tower)


@pytest.mark.parametrize("name", ["Qwen/Qwen2-VL-2B-Instruct", "./some/directory", ""])
def test_other_names_are_returned_unchanged(name: str) -> None:
    assert registry.resolve(name) == name


def test_an_unknown_built_in_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="builtin:tiny-qwen2-vl, builtin:tiny-qwen3-vl, builtin:tiny-llava"):
        registry.resolve("builtin:tiny")


def test_resolving_imports_no_heavy_library() -> None:
    code = "import sys, models.registry; print([n for n in ('torch', 'transformers', 'vllm') if n in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
