"""A whole pipeline in child processes of this one: Ray on loopback and free ports, and `serve run` on a config file.

Used by the demo, the benchmarks and the tests. Whatever happens, nothing is left behind: the children are stopped
in order (Serve drains, Ray ends its own), and a reaper ends what remains, also when this process is killed.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

from configs.schema import read_yaml
from serving.reaper import MARK, marked

__all__ = ["LocalPipeline", "PipelineFailed", "State", "free_ports"]

_POLL_S = 0.5
_ASK_S = 10.0  # a fresh engine's health check may take its time
_STOP_SERVE_S = 45.0
_STOP_RAY_S = 45.0
_RAY_STARTS = 3
_OBJECT_STORE_BYTES = 256 << 20

State = Mapping[str, str]
"""Deployment name to a word about it, such as `STARTING` or `RUNNING 2/2`."""


@dataclass(frozen=True)
class _Child:
    """A child process, the signal that asks it to stop, and how long that may take."""

    name: str
    process: subprocess.Popen[bytes]
    stop_signal: signal.Signals
    patience_s: float


class PipelineFailed(Exception):
    """The pipeline did not come up, or stopped by itself. The message ends with the last lines of the log."""


class ChildEnded(PipelineFailed):
    """A child process ended by itself."""


class LocalPipeline:
    """Starts a pipeline on entry, stops it on exit.

    Args:
        config: A Serve config file. It is served as it stands, but on a free port of its own.
        on_progress: Called about twice a second while engines start, with elapsed seconds and the deployments' states.
        start_timeout_s: Longest wait until the application answers.
        programs: Directory of the `ray` and `serve` programs; this interpreter's own by default.
    """

    def __init__(
        self,
        config: Path,
        *,
        on_progress: Callable[[float, State], None] = lambda elapsed_s, state: None,
        start_timeout_s: float = 600.0,
        programs: Path | None = None,
    ) -> None:
        self._config = config
        self._on_progress = on_progress
        self._start_timeout_s = start_timeout_s
        self._programs = programs or Path(sys.executable).parent
        self._mark = secrets.token_hex(16)
        self._token = secrets.token_hex(32)
        self._children: list[_Child] = []
        self._reaper: subprocess.Popen[bytes] | None = None
        self._directory = Path()
        self.url = ""
        self.dashboard_url = ""
        self.ray_address = ""

    def __enter__(self) -> Self:
        self._directory = Path(tempfile.mkdtemp(prefix="triptych-"))
        try:
            self._reaper = subprocess.Popen(
                [sys.executable, "-m", "serving.reaper", self._mark, str(self._directory)],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            self._start()
        except BaseException:  # an interrupt too: the children outlive this process otherwise
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def survivors(self) -> list[int]:
        """Ids of the processes of this pipeline that still run. Linux only; empty elsewhere."""
        return marked(self._mark)

    def environment(self) -> dict[str, str]:
        """The environment of this pipeline's processes; a driver that joins its Ray at `ray_address` needs it too."""
        return {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {
            MARK: self._mark,
            "VLLM_RPC_BASE_PATH": str(self._directory),  # engines do not remove their sockets; this goes with the rest
            "RAY_worker_niceness": "0",  # Ray's default of 15 starves engines on a busy machine
            "RAY_raylet_start_wait_time_s": "40",  # how soon `ray start` notices that its node did not come up
            "RAY_USAGE_STATS_ENABLED": "0",
            # Of Serve's HTTP proxy; the replicas are told by the application.
            "RAY_SERVE_PROXY_USE_GRPC": "1",
            "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(1 << 30),
            # A token of its own: Ray otherwise takes one that some other Ray may have left in the home directory.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self._token,
            # The only switch that keeps Ray's own ports on loopback; its name tells where that is the default.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }

    def states(self) -> State:
        """What Serve says of each deployment now."""
        with self._to_ray() as to_ray:
            return self._states(to_ray)

    def log_tail(self, program: str = "serve", lines: int = 40) -> str:
        """The last lines that `serve run` or `ray start` printed, without Ray's dumps of its own state."""
        log = self._directory / f"{program}.log"
        if not log.is_file():
            return ""
        kept = [line for line in log.read_text(errors="replace").splitlines() if "[state-dump]" not in line]
        return "\n".join(kept[-lines:])

    def stop(self) -> None:
        """End everything, in order; may be called again. An interrupt meanwhile only shortens the wait."""
        while self._children:
            child = self._children.pop()
            child.process.send_signal(child.stop_signal)
            try:
                child.process.wait(child.patience_s)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                child.process.kill()
                child.process.wait()
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.close()
            self._reaper.wait()
            self._reaper = None

    def _start(self) -> None:
        (http,) = free_ports(1)
        file = self._directory / "serve.yaml"
        file.write_text(yaml.safe_dump(_on_port(read_yaml(self._config), http)))
        self.url = f"http://127.0.0.1:{http}"
        began = time.monotonic()
        self._start_ray(began)
        self._launch("serve", ["run", "--address", self.ray_address, str(file)], signal.SIGINT, _STOP_SERVE_S)
        with self._to_ray() as to_ray, httpx.Client(base_url=self.url, timeout=_ASK_S) as to_app:
            self._await(began, lambda: _answers(to_app, "/health"), lambda: self._states(to_ray))

    def _start_ray(self, began: float) -> None:
        """Start Ray.

        Ray allows its node's agent a fixed 15 s to start, too little on a machine that is busy or reads its programs
        from disk for the first time. The next try finds them in memory.

        Raises:
            ChildEnded: It did not start, several times over.
        """
        for _ in range(_RAY_STARTS - 1):
            try:
                self._try_ray(began)
                return
            except ChildEnded:
                self._children.pop()
        self._try_ray(began)

    def _try_ray(self, began: float) -> None:
        gcs, dashboard, *others = free_ports(7)
        self.dashboard_url = f"http://127.0.0.1:{dashboard}"
        self.ray_address = f"127.0.0.1:{gcs}"
        directory = Path(tempfile.mkdtemp(prefix="ray-", dir=self._directory))
        self._launch("ray", _ray_arguments(gcs, dashboard, others, directory), signal.SIGTERM, _STOP_RAY_S)
        with self._to_ray() as to_ray:
            self._await(began, lambda: _has_node(to_ray), lambda: {"ray": "STARTING"})

    def _to_ray(self) -> httpx.Client:
        authorization = {"Authorization": f"Bearer {self._token}"}
        return httpx.Client(base_url=self.dashboard_url, headers=authorization, timeout=_ASK_S)

    def _launch(self, program: str, arguments: Sequence[str], stop_signal: signal.Signals, patience_s: float) -> None:
        with (self._directory / f"{program}.log").open("wb") as log:
            child = subprocess.Popen(
                [str(self._programs / program), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment(),
                start_new_session=True,  # Ctrl-C reaches this process only, which then stops the children in order
            )
        self._children.append(_Child(program, child, stop_signal, patience_s))

    def _await(self, began: float, ready: Callable[[], bool], states: Callable[[], State]) -> None:
        """Return when `ready` is true.

        Raises:
            ChildEnded: The newest child did, before it was ready.
            PipelineFailed: The application failed to deploy, or the time is over.
        """
        while not ready():
            elapsed_s = time.monotonic() - began
            self._on_progress(elapsed_s, states())
            if elapsed_s > self._start_timeout_s:
                raise PipelineFailed(f"not ready after {elapsed_s:.0f} s\n{self.log_tail(self._children[-1].name)}")
            newest = self._children[-1]
            try:
                newest.process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            raise ChildEnded(
                f"{newest.name} ended with status {newest.process.returncode}\n{self.log_tail(newest.name)}"
            )

    def _states(self, to_ray: httpx.Client) -> State:
        """What Serve says of each deployment.

        Raises:
            PipelineFailed: Serve gave the application up.
        """
        try:
            applications = to_ray.get("/api/serve/applications/").json()["applications"]
        except (httpx.HTTPError, ValueError, KeyError):
            return {"serve": "STARTING"}  # the dashboard answers before Serve does
        states: dict[str, str] = {}
        for application in applications.values():
            if application["status"] == "DEPLOY_FAILED":
                raise PipelineFailed(f"{application['message']}\n{self.log_tail()}")
            states |= {name: _word(deployment) for name, deployment in application["deployments"].items()}
        return states or {"serve": "BUILDING"}


def free_ports(number: int) -> list[int]:
    """Ports of loopback that nobody listened on a moment ago, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports: list[int] = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _ray_arguments(gcs: int, dashboard: int, others: Sequence[int], directory: Path) -> list[str]:
    """`ray start` arguments that let several Rays live on one machine: no port and no directory is shared."""
    agent, agent_grpc, client, metrics, environments = others
    return [
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--node-ip-address=127.0.0.1",
        f"--port={gcs}",
        "--dashboard-host=127.0.0.1",
        f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}",
        f"--dashboard-agent-grpc-port={agent_grpc}",
        f"--ray-client-server-port={client}",
        f"--metrics-export-port={metrics}",
        f"--runtime-env-agent-port={environments}",
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        f"--temp-dir={directory}",
    ]


def _on_port(content: Any, port: int) -> Any:
    return content | {"http_options": {**content.get("http_options", {}), "host": "127.0.0.1", "port": port}}


def _answers(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def _has_node(to_ray: httpx.Client) -> bool:
    """Whether Ray's one node has joined, which it does some time after the dashboard answers."""
    try:
        total: int = to_ray.get("/api/v0/nodes").json()["data"]["result"]["total"]
    except (httpx.TransportError, ValueError, LookupError):
        return False
    return total > 0


def _word(deployment: Mapping[str, Any]) -> str:
    """`RUNNING`, or what the replicas are at, with numbers where there are several."""
    states = [replica["state"] for replica in deployment["replicas"]] or ["PENDING"]
    running = states.count("RUNNING")
    word = "RUNNING" if running == len(states) else next(state for state in states if state != "RUNNING")
    return word if len(states) == 1 else f"{word} {running}/{len(states)}"
