"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--repeat", type=int, default=1, metavar="N", help="run each fault test N times")
    parser.addoption(
        "--parity-servers",
        nargs=2,
        metavar=("PIPELINE", "VLLM"),
        help="URLs of servers that already run and that the parity tests compare, instead of starting both",
    )
    parser.addoption(
        "--whole-matrix",
        action="store_true",
        help="everything for every built-in model, not for one with M-RoPE and one without",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    times = metafunc.config.getoption("repeat")
    if times > 1 and metafunc.definition.get_closest_marker("fault"):
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(times))
