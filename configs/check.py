"""`python -m configs.check FILE`: judge a Serve config file before Ray or an engine starts.

`serve run` starts Ray first, runs the application's builder in a remote task and ends with status 0 whatever it
raised. This command takes about a second and prints every mistake, one a line, with the key's path. Ray's own
schema ignores keys that it does not know, and its import is slow; the outer file is therefore described here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from configs.base import Frozen
from configs.schema import ConfigError, PipelineConfig, describe, read_yaml

__all__ = ["Application", "HttpOptions", "ServeFile", "check", "main"]


class HttpOptions(Frozen):
    """Ray Serve's HTTP proxy."""

    host: str = "0.0.0.0"
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    root_path: str = ""
    request_timeout_s: Annotated[float, Field(gt=0)] | None = None
    keep_alive_timeout_s: Annotated[int, Field(ge=1)] = 90
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: str | None = None


class Application(Frozen):
    """The one application of the file."""

    name: str = "default"
    route_prefix: str | None = "/"
    import_path: Literal["serving.app:build"]
    runtime_env: dict[str, Any] = Field({})
    host: str = "0.0.0.0"
    port: int = 8000
    deployments: tuple[Any, ...] = ()
    autoscaling_policy: dict[str, Any] | None = None
    args: PipelineConfig
    logging_config: dict[str, Any] | None = None
    external_scaler_enabled: bool = False

    @field_validator("deployments")
    @classmethod
    def _args_decide(cls, deployments: tuple[Any, ...]) -> tuple[Any, ...]:
        if deployments:
            raise ValueError("would overrule what args says of each stage; set it under args.models[].<stage> instead")
        return deployments


class ServeFile(Frozen):
    """A Serve config file. Parts that only Ray interprets are left to Ray."""

    proxy_location: Literal["Disabled", "HeadOnly", "EveryNode"] = "EveryNode"
    http_options: HttpOptions = HttpOptions()
    grpc_options: dict[str, Any] = Field({})
    controller_options: dict[str, Any] | None = None
    logging_config: dict[str, Any] | None = None
    tracing_config: dict[str, Any] | None = None
    target_capacity: Annotated[float, Field(ge=0, le=100)] | None = None
    applications: tuple[Application, ...]

    @field_validator("applications")
    @classmethod
    def _exactly_one(cls, applications: tuple[Application, ...]) -> tuple[Application, ...]:
        if len(applications) != 1:
            raise ValueError(f"expected exactly one application, got {len(applications)}; put models side by side")
        return applications

    @property
    def config(self) -> PipelineConfig:
        return self.applications[0].args


def check(path: Path) -> ServeFile:
    """The file's content, fully checked, the cluster secret included.

    Raises:
        ConfigError: Naming every wrong key and what would be right.
    """
    content = read_yaml(path)
    try:
        checked = ServeFile.model_validate(content)
    except ValidationError as error:
        raise ConfigError(describe(error, ServeFile)) from error
    checked.config.cluster.secret()
    return checked


def summary(checked: ServeFile) -> str:
    """One line about what the file will start."""
    models = ", ".join(f"{model.served_name} ({model.device})" for model in checked.config.models)
    http = checked.http_options
    return f"{models} at http://{http.host}:{http.port}{checked.applications[0].route_prefix or ''}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m configs.check", description="Check a Serve config file.")
    parser.add_argument("file", type=Path)
    path: Path = parser.parse_args(arguments).file
    try:
        checked = check(path)
    except ConfigError as error:
        print(f"{path} cannot be served:\n{error}", file=sys.stderr)
        return 1
    print(f"{path}: ok, {summary(checked)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
