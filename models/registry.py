"""Names of the checkpoints that ship with the package, and where they lie.

Imports neither torch nor transformers nor vLLM: configuration checks and routers resolve names too.
"""

from pathlib import Path
from typing import Final

PREFIX: Final = "builtin:"
CHECKPOINTS: Final = Path(__file__).resolve().parent / "checkpoints"
NAMES: Final = ("tiny-qwen2-vl", "tiny-qwen3-vl", "tiny-llava")


def resolve(name: str) -> str:
    """The model to hand to vLLM for `name`.

    Args:
        name: `builtin:NAME` for a checkpoint of this package; anything else (a directory, a hub name) is
            returned unchanged.

    Raises:
        ValueError: `NAME` is not a built-in checkpoint. The message lists those that are.
    """
    if not name.startswith(PREFIX):
        return name
    short = name.removeprefix(PREFIX)
    if short not in NAMES:
        known = ", ".join(PREFIX + known for known in NAMES)
        raise ValueError(f"unknown built-in model {name!r}; known: {known}")
    return str(CHECKPOINTS / short)
