"""vLLM's own OpenAI server as a child process: what the pipeline is compared with, by benchmarks and tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import IO, Any, Self

import httpx

from configs.schema import PipelineConfig, StageConfig, replica_environment
from serving.local import free_ports

__all__ = ["ServerFailed", "VllmServer", "aggregated", "answers", "engine_options"]

_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.5
"""Between two questions: a server announces to nobody that it listens, only its end wakes who waits for it."""


class ServerFailed(Exception):
    """The server did not come up. The message ends with what it printed last."""


def answers(url: str, process: subprocess.Popen[bytes], *, within_s: float) -> bool:
    """Whether the server comes to answer its health route in time; False at once when its process ends."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == httpx.codes.OK:
                return True
        except httpx.TransportError:
            pass  # it does not listen yet
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        return False
    return False


class VllmServer:
    """Starts a server on entry, without waiting for it; stops it on exit.

    Args:
        options: Options of the server by name, without dashes. None leaves one out.
        flags: Options without a value.
        environment: Variables that it starts with beside those of this process.
    """

    def __init__(
        self, options: Mapping[str, Any], flags: Sequence[str] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        given = {"host": "127.0.0.1", "port": port, **options}
        words = [f"--{name}={value}" for name, value in given.items() if value is not None]
        words += [f"--{flag}" for flag in flags]
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    def __enter__(self) -> Self:
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            self._command,
            env=os.environ | self._environment,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._log is not None
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # its engine too, which would outlive it
            self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def await_ready(self) -> None:
        """Return when the server answers.

        Raises:
            ServerFailed: It ended, or the time is over.
        """
        assert self._process is not None
        if not answers(self.url, self._process, within_s=_START_TIMEOUT_S):
            raise ServerFailed(f"vLLM's server did not start:\n{self.log_tail()}")

    def log_tail(self, size_bytes: int = 4000) -> str:
        """The last of what the server printed."""
        assert self._log is not None
        content = os.pread(self._log.fileno(), os.fstat(self._log.fileno()).st_size, 0)
        return content[-size_bytes:].decode(errors="replace")


def engine_options(config: PipelineConfig, stage: StageConfig) -> dict[str, Any]:
    """Options that give a server the engine settings of one stage of the pipeline's first model."""
    model = config.models[0]
    return {
        "model": model.checkpoint,
        "served-model-name": model.served_name,
        "max-model-len": model.max_model_len,
        "max-num-seqs": stage.max_num_seqs,
        "max-num-batched-tokens": stage.max_num_batched_tokens,
        "kv-cache-memory-bytes": stage.kv_cache_memory_bytes,
        "gpu-memory-utilization": stage.memory_utilization,
        "block-size": model.block_size,
        "limit-mm-per-prompt": model.limit_mm_per_prompt.model_dump_json(),
        "tool-call-parser": model.tool_call_parser,
        "reasoning-parser": model.reasoning_parser,
        "distributed-executor-backend": "uni",
    }


def aggregated(config: PipelineConfig, *, flags: Sequence[str] = ()) -> VllmServer:
    """One engine for everything, sized like the pipeline's prefill stage."""
    options = engine_options(config, config.models[0].prefill)
    return VllmServer(options, ["enforce-eager", *flags], replica_environment(config))
