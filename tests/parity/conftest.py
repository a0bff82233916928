"""Both servers, once for the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parity.contenders import Both, running
from tests.parity.contenders import both as start_both


@pytest.fixture(scope="session")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    urls = request.config.getoption("parity_servers")
    with running(*urls) if urls else start_both(tmp_path_factory.mktemp("parity")) as started:
        yield started


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "parity":
            item.add_marker(pytest.mark.parity)
            item.add_marker(pytest.mark.timeout(900))
