"""docs/configuration.md says what the schema says."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from configs.document import _models_in, markdown
from configs.schema import PipelineConfig

DOCUMENT = Path(__file__).parents[3] / "docs" / "configuration.md"


def models(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield root
    for field in root.model_fields.values():
        for nested, _ in _models_in(field.annotation):
            yield from models(nested)


MODELS = sorted(set(models(PipelineConfig)), key=lambda model: model.__name__)


def test_the_document_is_the_one_that_the_schema_makes() -> None:
    assert DOCUMENT.read_text() == markdown(), "run `make docs`"


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_key_has_a_reason_and_stands_in_the_document(model: type[BaseModel]) -> None:
    text = markdown()
    for key, field in model.model_fields.items():
        assert field.description, f"{model.__name__}.{key} has no description"
        assert f"| `{key}` |" in text
