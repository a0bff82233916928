"""docs/feature_contract.md has an example for every row of its table; `tests/pipeline` sends them."""

from __future__ import annotations

import re

from tests.pipeline.test_contract_examples import DOCUMENT, ROWS, SUBJECT, fragment, printed


def test_every_row_of_the_table_has_its_example() -> None:
    table = DOCUMENT.read_text().split("## The table", 1)[1].split("- **The guard**", 1)[0]
    rows = [line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")][2:]
    assert [row.split(" (")[0].capitalize() for row in rows] == list(ROWS)
    examples = DOCUMENT.read_text().split("## Examples", 1)[1].split("\n## ", 1)[0]
    assert re.findall(r"^### (.*)$", examples, re.MULTILINE) == list(ROWS)


def test_every_example_can_be_read() -> None:
    told = {row: {kind: printed(row, kind) for kind in SUBJECT} for row in ROWS if fragment(row) is not None}
    types = {row: [None if error is None else error["type"] for error in kinds.values()] for row, kinds in told.items()}
    assert list(types.values()) == [
        [None, None],
        [None, None],
        ["ec_reference_required", "multimodal_cache_miss"],
        ["feature_data_required", None],
        ["feature_data_required", "multimodal_cache_miss"],
    ]
