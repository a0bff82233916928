"""What `benchmarks.serve` measures side by side: the pipeline, one engine, and three servers behind a proxy.

All serve the same model with the same engine settings on this machine. Each knows the CPU time that its processes
have used, and the bytes that its hops have carried.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from benchmarks.servers import ServerFailed, VllmServer, aggregated, answers, engine_options
from configs.schema import PipelineConfig, load, replica_environment
from serving.local import LocalPipeline, free_ports

__all__ = ["Contender", "all_contenders"]

_PROXY_START_S = 60.0
_PROXY_STOP_S = 10.0


@dataclass(frozen=True)
class Contender:
    """One way to serve the model.

    `pids` are its processes at the moment of asking; `hop_bytes` counts by stage since it started.
    """

    name: str
    url: str
    pids: Callable[[], list[int]]
    hop_bytes: Callable[[], Mapping[str, float]]

    def cpu_seconds(self) -> float:
        """CPU time that its living processes have used so far."""
        used = 0.0
        for pid in self.pids():
            try:
                times = psutil.Process(pid).cpu_times()
            except psutil.NoSuchProcess:
                continue
            used += times.user + times.system
        return used


@contextmanager
def all_contenders(config_file: Path) -> Iterator[tuple[Contender, Contender, Contender]]:
    """The pipeline, the aggregated server and the proxy's three servers, all running."""
    config = load(config_file)
    with ExitStack() as stack:
        pipeline = stack.enter_context(
            LocalPipeline(config_file)
        )  # first: Ray gives its own parts little time to start
        engine = stack.enter_context(aggregated(config))
        proxy = stack.enter_context(_proxied(config))
        engine.await_ready()
        ours = Contender("pipeline", pipeline.url, pipeline.survivors, lambda: _metric_bytes(pipeline.url))
        theirs = Contender("aggregated", engine.url, lambda: _tree(engine.pid), dict)
        yield ours, theirs, proxy


@contextmanager
def _proxied(config: PipelineConfig) -> Iterator[Contender]:
    """E, P and D as the example starts them: encodings through files, KV blocks through NIXL."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        stages = {stage: stack.enter_context(_stage_server(config, stage, folder)) for stage in _ROLES}
        for server in stages.values():
            server.await_ready()
        (port,) = free_ports(1)
        url = f"http://127.0.0.1:{port}"
        options = [f"--{stage}={server.url}" for stage, server in stages.items()]
        command = [sys.executable, "-m", "benchmarks.epd_proxy", f"--port={port}", *options]
        process = subprocess.Popen(command)
        try:
            if not answers(url, process, within_s=_PROXY_START_S):
                raise ServerFailed("the proxy did not start")
            roots = [process.pid, *(server.pid for server in stages.values())]
            yield Contender(
                "proxy", url, lambda: [pid for root in roots for pid in _tree(root)], lambda: _proxy_bytes(url, folder)
            )
        finally:
            process.terminate()
            process.wait(_PROXY_STOP_S)


_ROLES = {
    "encode": ("ec_producer", None),
    "prefill": ("ec_consumer", "kv_producer"),
    "decode": (None, "kv_consumer"),
}


def _stage_server(config: PipelineConfig, stage: str, folder: str) -> VllmServer:
    model = config.models[0]
    ec_role, kv_role = _ROLES[stage]
    options = engine_options(config, model.stages["encoder" if stage == "encode" else stage])
    flags = ["enforce-eager"]
    if ec_role is not None:
        extra = {"shared_storage_path": folder}
        transfer = {"ec_connector": "ECExampleConnector", "ec_role": ec_role, "ec_connector_extra_config": extra}
        options["ec-transfer-config"] = json.dumps(transfer)
    if kv_role is not None:
        blocks = {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_buffer_device": "cpu"}
        options["kv-transfer-config"] = json.dumps(blocks)
    else:
        flags.append("no-enable-prefix-caching")
    (side_channel,) = free_ports(1)
    side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel)}
    return VllmServer(options, flags, replica_environment(config) | side)


def _tree(pid: int) -> list[int]:
    """A process and all that it has started."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _metric_bytes(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics", timeout=30.0).raise_for_status().text
    found = re.findall(r'^triptych_hop_bytes_total\{stage="(\w+)"\} (\S+)$', text, re.MULTILINE)
    return {stage: float(value) for stage, value in found}


def _proxy_bytes(url: str, folder: str) -> dict[str, float]:
    """Bodies as the proxy counts them, and the files through which encodings passed."""
    told: dict[str, float] = httpx.get(f"{url}/hop_bytes", timeout=30.0).raise_for_status().json()
    files = [os.path.join(path, name) for path, _, names in os.walk(folder) for name in names]
    return told | {"encodings": float(sum(os.path.getsize(file) for file in files))}
