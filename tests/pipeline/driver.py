"""Calls deployment handles of a running application: `python -m tests.pipeline.driver ADDRESS`.

A process of its own, as a user's program would be: it joins the application's Ray and reads one call a line from
standard input, `{"deployment", "method", "data"}`. `deployment` None means the application's own handle; `data` is a
JSON object, or a string with base64 of a message's bytes. Each answer is a line, `{"answer"}` or `{"error"}`.
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import ray
from ray import serve
from ray.exceptions import RayTaskError

from serving.errors import TriptychError
from serving.local import LocalPipeline

APPLICATION = "triptych"
_TIMEOUT_S = 60.0


class Refused(Exception):
    """A `TriptychError` on the other side."""

    def __init__(self, type: str, param: str | None, hashes: list[str]) -> None:
        super().__init__(type, param, hashes)
        self.type, self.param, self.hashes = type, param, hashes


class Driver:
    """The other end of `main`'s pipes."""

    def __init__(self, calls: IO[str], answers: IO[str]) -> None:
        self._calls, self._answers = calls, answers

    def stage(self, deployment: str, method: str, data: bytes) -> bytes:
        """Call a stage. Raises `Refused`."""
        answer = self._call(deployment, method, base64.b64encode(data).decode())
        return base64.b64decode(answer)

    def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Call the application's own handle. Raises `Refused`."""
        answer: dict[str, Any] = self._call(None, "generate", request)
        return answer

    def _call(self, deployment: str | None, method: str, data: Any) -> Any:
        call = {"deployment": deployment, "method": method, "data": data}
        print(json.dumps(call), file=self._calls, flush=True)
        answer = json.loads(self._answers.readline())
        if "error" in answer:
            raise Refused(**answer["error"])
        return answer["answer"]


@contextmanager
def driver(pipeline: LocalPipeline) -> Iterator[Driver]:
    """A driver process that has joined `pipeline`'s Ray."""
    command = [sys.executable, "-m", "tests.pipeline.driver", pipeline.ray_address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=pipeline.environment(), **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"answer": "ready"}
        yield Driver(process.stdin, process.stdout)
        process.stdin.close()


def main(address: str) -> None:
    ray.init(address=address, logging_level="error", log_to_driver=False)
    print(json.dumps({"answer": "ready"}), flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(**json.loads(line))), flush=True)


def _answer(deployment: str | None, method: str, data: Any) -> dict[str, Any]:
    if deployment is None:
        handle = serve.get_app_handle(APPLICATION)
    else:
        handle = serve.get_deployment_handle(deployment, APPLICATION)
    argument = base64.b64decode(data) if isinstance(data, str) else data
    try:
        answer = handle.options(method_name=method).remote(argument).result(timeout_s=_TIMEOUT_S)
    except RayTaskError as error:
        return {"error": _told(error.cause)}
    except TriptychError as error:
        return {"error": _told(error)}
    return {"answer": base64.b64encode(answer).decode() if isinstance(answer, bytes) else answer.model_dump()}


def _told(error: BaseException) -> dict[str, Any]:
    if not isinstance(error, TriptychError):
        raise error
    return {"type": error.code, "param": error.param, "hashes": list(error.hashes)}


if __name__ == "__main__":
    main(sys.argv[1])
