"""The command that judges a file before Ray starts, and the files that ship."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from configs.check import Application, HttpOptions, ServeFile, check, main
from configs.schema import ConfigError

CONFIGS = Path(__file__).parents[3] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))
GOOD: dict[str, Any] = {
    "applications": [{"import_path": "serving.app:build", "args": {"models": [{"model": "builtin:tiny-llava"}]}}]
}


def refusal(tmp_path: Path, **changes: Any) -> str:
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump(GOOD | changes))
    with pytest.raises(ConfigError) as caught:
        check(file)
    return str(caught.value)


def application(**changes: Any) -> list[dict[str, Any]]:
    return [GOOD["applications"][0] | changes]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.name)
def test_shipped_files_are_right_by_our_rules_and_by_rays(file: Path) -> None:
    content = yaml.safe_load(file.read_text())
    config = ServeFile.model_validate(content).config
    assert ServeDeploySchema.model_validate(content).applications[0].import_path == "serving.app:build"
    assert all(model.prefill.enable_prefix_caching for model in config.models)


def test_the_default_needs_no_accelerator_network_or_secret() -> None:
    checked = check(CONFIGS / "pipeline.yaml")
    assert checked.http_options.host == "127.0.0.1"
    assert checked.config.cluster.is_loopback
    for model in checked.config.models:
        assert model.is_local
        assert model.device == "cpu"
        assert {stage.num_replicas for stage in model.stages.values()} == {1}


@pytest.mark.parametrize(
    ("ours", "rays"),
    [(ServeFile, ServeDeploySchema), (Application, ServeApplicationSchema), (HttpOptions, HTTPOptionsSchema)],
)
def test_the_outer_keys_are_those_of_ray(ours: Any, rays: Any) -> None:
    assert set(ours.model_fields) == set(rays.model_fields)


def test_mistakes_outside_the_arguments_are_named_too(tmp_path: Path) -> None:
    assert refusal(tmp_path, http_option={}) == "http_option: unknown key; did you mean 'http_options'?"
    assert "http_options.prot: unknown key; did you mean 'port'?" in refusal(tmp_path, http_options={"prot": 1})
    assert "http_options.port: must be <= 65535, got 99999" in refusal(tmp_path, http_options={"port": 99999})
    assert "applications[0].import_path: must be " in refusal(tmp_path, applications=application(import_path="a:b"))
    assert "applications: expected exactly one application, got 2" in refusal(tmp_path, applications=application() * 2)


def test_deployment_overrides_are_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, applications=application(deployments=[{"name": "Decode", "num_replicas": 3}]))
    assert "applications[0].deployments: would overrule what args says" in text


def test_a_secret_that_cannot_be_read_is_found_before_anything_starts(tmp_path: Path) -> None:
    cluster = {"advertise_host": "auto", "peer_networks": ["10.0.0.0/8"], "cluster_secret_file": str(tmp_path / "no")}
    args = GOOD["applications"][0]["args"] | {"cluster": cluster}
    assert "cannot read" in refusal(tmp_path, applications=application(args=args))


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(CONFIGS / "pipeline.yaml")]) == 0
    assert "ok, tiny-qwen2-vl (cpu) at http://127.0.0.1:8000/" in capsys.readouterr().out
    assert main([str(tmp_path / "missing.yaml")]) == 1
    assert "cannot read" in capsys.readouterr().err


def test_the_command_starts_neither_ray_nor_an_engine() -> None:
    program = (
        "import sys; from configs.check import main; main(['configs/pipeline.yaml']); "
        "sys.exit(any(name in sys.modules for name in ('ray', 'vllm', 'torch')))"
    )
    subprocess.run([sys.executable, "-c", program], cwd=CONFIGS.parent, check=True, timeout=60)
