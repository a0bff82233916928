"""Starting and stopping child processes, with small programs in place of `ray` and `serve`."""

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.local import LocalPipeline, PipelineFailed, State, free_ports
from serving.reaper import marked

Programs = Callable[..., Path]

A_NODE: dict[str, object] = {"data": {"result": {"total": 1}}}
NOTHING_YET: dict[str, object] = A_NODE | {"applications": {}}

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(ANSWER).encode())
    def log_message(self, *args): pass
def serve(port): HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""
RAY = (
    SERVER
    + """
print("ray", sys.argv)
ports = dict(word[2:].split("=") for word in sys.argv if word.startswith("--") and "=" in word)
serve(ports["dashboard-port"])
"""
)
SERVE = (
    SERVER
    + """
import signal, subprocess, yaml
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
subprocess.Popen(["sleep", "600"], start_new_session=True)  # outlives its parent, as engines might
serve(yaml.safe_load(open(sys.argv[-1]))["http_options"]["port"])
"""
)


@pytest.fixture
def programs(tmp_path: Path) -> Programs:
    def write(*, ray: str = RAY, serve: str = SERVE, answer: object = NOTHING_YET) -> Path:
        for name, source in {"ray": ray, "serve": serve}.items():
            file = tmp_path / name
            file.write_text(f"#!{sys.executable}\nANSWER = {answer!r}\n{textwrap.dedent(source)}")
            file.chmod(0o755)
        return tmp_path

    return write


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text("http_options: {host: 0.0.0.0, port: 8000, root_path: /x}\napplications: []\n")
    return file


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended may wait to be reaped by a parent that is not ours."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_it_serves_on_a_port_of_its_own_and_leaves_nothing(programs: Programs, config: Path) -> None:
    with LocalPipeline(config, programs=programs()) as pipeline:
        during = pipeline.survivors()
        assert len(during) == 3  # ray, serve, and the child that serve started
        assert not pipeline.url.endswith(":8000")
        directory = pipeline._directory
    assert pipeline.survivors() == []
    assert not any(is_alive(pid) for pid in during)
    assert not directory.exists()


def test_an_error_inside_leaves_nothing_either(programs: Programs, config: Path) -> None:
    pipeline = LocalPipeline(config, programs=programs())
    with pytest.raises(KeyboardInterrupt), pipeline:
        raise KeyboardInterrupt
    assert pipeline.survivors() == []


@pytest.mark.parametrize("broken", ["ray", "serve"])
def test_a_program_that_ends_is_named_with_its_last_words(programs: Programs, config: Path, broken: str) -> None:
    failing = {broken: "import sys; print('no room on this machine'); sys.exit(3)"}
    pipeline = LocalPipeline(config, programs=programs(**failing))
    with pytest.raises(PipelineFailed, match=rf"(?s){broken} ended with status 3.*no room on this machine"), pipeline:
        pytest.fail("it must not start")
    assert pipeline.survivors() == []


def test_a_deployment_that_failed_ends_the_wait(programs: Programs, config: Path) -> None:
    answer = A_NODE | {
        "applications": {"t": {"status": "DEPLOY_FAILED", "message": "no such model", "deployments": {}}}
    }
    silent = "import time; time.sleep(600)"
    pipeline = LocalPipeline(config, programs=programs(serve=silent, answer=answer))
    with pytest.raises(PipelineFailed, match="no such model"), pipeline:
        pytest.fail("it must not start")
    assert pipeline.survivors() == []


def test_the_wait_has_an_end_and_shows_what_it_waits_for(programs: Programs, config: Path) -> None:
    replicas = [{"state": "RUNNING"}, {"state": "STARTING"}]
    deployments = {"decode": {"replicas": replicas}, "prefill": {"replicas": []}}
    answer = A_NODE | {"applications": {"t": {"status": "DEPLOYING", "message": "", "deployments": deployments}}}
    seen: list[State] = []
    pipeline = LocalPipeline(
        config,
        programs=programs(
            ray="import time; time.sleep(1)\n" + RAY, serve="import time; time.sleep(600)", answer=answer
        ),
        on_progress=lambda elapsed_s, state: seen.append(state),
        start_timeout_s=5.0,
    )
    with pytest.raises(PipelineFailed, match="not ready after"), pipeline:
        pytest.fail("it must not start")
    assert {"ray": "STARTING"} in seen
    assert {"decode": "STARTING 1/2", "prefill": "PENDING"} in seen


def test_ray_may_fail_to_start_once_or_twice(programs: Programs, config: Path, tmp_path: Path) -> None:
    counter = tmp_path / "tries"
    flaky = (
        f"tries = open({str(counter)!r}, 'a+'); tries.write('x'); tries.seek(0)\nif len(tries.read()) < 3: exit(1)\n"
    )
    with LocalPipeline(config, programs=programs(ray=flaky + RAY)) as pipeline:
        assert len(pipeline.survivors()) == 3
    assert counter.read_text() == "xxx"


def test_free_ports_differ_and_can_be_bound() -> None:
    ports = free_ports(8)
    assert len(set(ports)) == 8
    assert all(1024 <= port <= 65535 for port in ports)


def test_another_rays_address_is_not_followed(
    programs: Programs, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check = "import os, sys\nif 'RAY_ADDRESS' in os.environ: sys.exit(9)\n"
    with LocalPipeline(config, programs=programs(ray=check + RAY, serve=check + SERVE)):
        assert os.environ["RAY_ADDRESS"]


STARTER = """
import sys, time
from pathlib import Path
from serving.local import LocalPipeline
from serving.reaper import marked
with LocalPipeline(Path(sys.argv[1]), programs=Path(sys.argv[2])) as pipeline:
    print(pipeline._mark, pipeline._directory, flush=True)
    time.sleep(600)
"""


def test_nothing_is_left_of_a_starter_that_was_killed(programs: Programs, config: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER, config, programs()], stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        mark, directory = starter.stdout.readline().decode().split()
        during = marked(mark)
        starter.kill()
    deadline = time.monotonic() + 30
    while (marked(mark) or Path(directory).exists()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(during) == 3
    assert not any(is_alive(pid) for pid in during)
    assert not Path(directory).exists()
