"""Settings are strict, and contradictions are refused with a reason."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ec_connector.config import check_slab_size, parse_config
from ec_connector.core import control_address
from ec_connector.protocol import compatibility_hash, ref_from
from tests.unit.ec_connector.ec_fakes import ref

LOOPBACK = {"control_host": "127.0.0.1"}


class TestParsing:
    def test_only_the_host_is_required(self) -> None:
        config = parse_config(LOOPBACK)
        assert (config.control_port, config.read_deadline_s, config.pin_lease_s) == (0, 10.0, 60.0)

    @pytest.mark.parametrize(
        ("extra", "message"),
        [
            ({}, "control_host"),
            (LOOPBACK | {"slab_size": 1}, "slab_size"),
            (LOOPBACK | {"slab_bytes": "1"}, "slab_bytes"),
            ({"control_host": "encoder-1"}, "IP address"),
            ({"control_host": "10.0.0.1"}, "secret_hex is required"),
            (LOOPBACK | {"secret_hex": "xy"}, "hexadecimal"),
            (LOOPBACK | {"secret_hex": "00"}, "16 bytes"),
            (LOOPBACK | {"peer_networks": ["10.0.0.1/8"]}, "CIDR"),
            (LOOPBACK | {"pin_lease_s": 40.0}, "pin_lease_s"),
            (LOOPBACK | {"slab_bytes": 0}, "positive"),
            (LOOPBACK | {"inflight_bytes": -1}, "negative"),
            (LOOPBACK | {"control_port": 70000}, "port"),
        ],
    )
    def test_a_bad_setting_is_named(self, extra: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            parse_config(extra)

    def test_off_loopback_a_secret_is_enough(self) -> None:
        assert len(parse_config({"control_host": "10.0.0.1", "secret_hex": "ab" * 16}).secret) == 16


class TestPeers:
    @pytest.mark.parametrize(
        ("host", "allowed"), [("10.1.2.3", True), ("11.0.0.1", False), ("localhost", False), ("", False)]
    )
    def test_only_addresses_in_the_networks(self, host: str, allowed: bool) -> None:
        config = parse_config(LOOPBACK | {"peer_networks": ["10.0.0.0/8"]})
        assert config.allows(host) is allowed

    def test_ipv6_addresses_are_bracketed(self) -> None:
        assert control_address("::1", 5) == "tcp://[::1]:5"
        assert control_address("127.0.0.1", 5) == "tcp://127.0.0.1:5"


class TestSize:
    def test_both_numbers_are_named(self) -> None:
        config = parse_config(LOOPBACK | {"slab_bytes": 32_767, "inflight_bytes": 4096})
        with pytest.raises(ValueError, match=r"32767.*32768"):
            check_slab_size(config, cache_rows=7, row_bytes=128)
        check_slab_size(config, cache_rows=6, row_bytes=128)


def test_compatibility_depends_on_all_that_fixes_the_outputs() -> None:
    hashes = {
        compatibility_hash(model=model, revision=revision, dtype=dtype)
        for model in ("a", "b")
        for revision in (None, "main")
        for dtype in ("bfloat16", "float16")
    }
    assert len(hashes) == 8


class TestReferences:
    def test_a_reference_is_found_beside_upstreams_keys(self) -> None:
        params = {"a": {"metadata": {}, "item_indices": [0], "ref": msgspec.to_builtins(ref("a"))}}
        assert ref_from(params, "a") == ref("a")

    @pytest.mark.parametrize(
        "params",
        [None, {}, {"a": None}, {"a": 1}, {"a": {"ref": None}}, {"a": {"ref": {"peer": "x"}}}, [1], "text", {1: {}}],
    )
    def test_anything_else_counts_as_none(self, params: object) -> None:
        assert ref_from(params, "a") is None
