"""ray_cluster.yaml and configs/gpu_cluster.yaml, held together: neither may change alone."""

import copy
import ipaddress
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from configs.schema import DeploymentConfig, PipelineConfig, StageConfig, load

ROOT = Path(__file__).resolve().parents[2]
Launcher = dict[str, Any]


@pytest.fixture
def launcher() -> Launcher:
    content: Launcher = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    return content


@pytest.fixture
def config() -> PipelineConfig:
    return load(ROOT / "configs" / "gpu_cluster.yaml")


def disagreements(launcher: Launcher, config: PipelineConfig) -> list[str]:
    """What the pipeline asks for and the cluster does not offer, or offers in vain."""
    types = launcher["available_node_types"]
    found = []
    for name, stage in config.models[0].stages.items():
        node = types.get(name)
        if node is None:
            found.append(f"{name}: no node type")
            continue
        found += [f"{name}: {what}" for what in unmet(node["resources"], stage)]
        assert stage.autoscaling is not None
        wanted = (stage.autoscaling.min_replicas, stage.autoscaling.max_replicas)
        if (node["min_workers"], node["max_workers"]) != wanted:
            found.append(f"{name}: {wanted} replicas, other numbers of workers")
        if stage.resources != {name: 1}:
            found.append(f"{name}: not bound to its node type")
    head = types[launcher["head_node_type"]]["resources"]
    assert config.ingress.autoscaling is not None
    replicas = config.ingress.autoscaling.max_replicas
    found += [f"ingress: {what}" for what in unmet(head, config.ingress, replicas=replicas)]
    found += [f"{name}: no stage uses it" for name in set(types) - set(config.models[0].stages) - {"head"}]
    if max_workers(launcher) != launcher["max_workers"]:
        found.append("max_workers is not the sum of the node types")
    if str(config.cluster.cluster_secret_file) not in launcher["file_mounts"]:
        found.append("the secret file is not put on the nodes")
    if not any(config.models[0].model in command for command in launcher["worker_setup_commands"]):
        found.append("the workers fetch another model")
    return found


def unmet(offered: dict[str, int], deployment: DeploymentConfig, replicas: int = 1) -> list[str]:
    asked = {"CPU": deployment.num_cpus, **deployment.resources}
    if isinstance(deployment, StageConfig):
        asked["GPU"] = deployment.num_gpus
    lacking = {name: need * replicas for name, need in asked.items() if offered.get(name, 0) < need * replicas}
    return [f"{name} {offered.get(name, 0)} < {need:g}" for name, need in lacking.items()]


def max_workers(launcher: Launcher) -> int:
    return sum(node["max_workers"] for node in launcher["available_node_types"].values())


def test_ray_accepts_the_launcher_file(launcher: Launcher) -> None:
    validate_config(prepare_config(copy.deepcopy(launcher)))


def test_ray_would_refuse_an_unknown_key(launcher: Launcher) -> None:
    with pytest.raises(Exception, match="workerz"):
        validate_config(prepare_config(launcher | {"workerz": 1}))


def test_the_two_files_agree(launcher: Launcher, config: PipelineConfig) -> None:
    assert disagreements(launcher, config) == []


@pytest.mark.parametrize("name", ["encoder", "prefill", "decode"])
def test_a_node_type_that_changes_alone_is_noticed(launcher: Launcher, config: PipelineConfig, name: str) -> None:
    for change in ({"max_workers": 9}, {"min_workers": 0}, {"resources": {"CPU": 16, "GPU": 1}}):
        changed = copy.deepcopy(launcher)
        changed["available_node_types"][name] |= change
        assert disagreements(changed, config)
    del launcher["available_node_types"][name]
    assert f"{name}: no node type" in disagreements(launcher, config)


@pytest.mark.parametrize("change", [{"num_gpus": 2, "tensor_parallel_size": 2}, {"num_cpus": 32}, {"resources": {}}])
def test_a_stage_that_changes_alone_is_noticed(launcher: Launcher, change: dict[str, Any]) -> None:
    values = yaml.safe_load((ROOT / "configs" / "gpu_cluster.yaml").read_text())["applications"][0]["args"]
    values["models"][0]["decode"] |= change
    assert disagreements(launcher, load(values))


def test_more_ingress_replicas_than_the_head_holds_are_noticed(launcher: Launcher, config: PipelineConfig) -> None:
    launcher["available_node_types"]["head"]["resources"]["ingress"] = 1
    assert disagreements(launcher, config) == ["ingress: ingress 1 < 4"]


def test_the_image_has_the_ray_that_the_project_pins(launcher: Launcher) -> None:
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"ray[serve]=={launcher['docker']['image'].split(':')[1].split('-')[0]}" in pinned


def test_nodes_outlive_the_wait_before_a_replica_goes(launcher: Launcher, config: PipelineConfig) -> None:
    for stage in config.models[0].stages.values():
        assert stage.autoscaling is not None
        assert launcher["idle_timeout_minutes"] * 60 > stage.autoscaling.downscale_delay_s


def test_a_cluster_has_a_secret_its_own_network_and_fixed_ports(config: PipelineConfig) -> None:
    assert not config.cluster.is_loopback
    assert config.cluster.advertise_host == "auto"
    assert config.cluster.side_channel_port_range is not None
    assert all(ipaddress.ip_network(network).is_private for network in config.cluster.peer_networks)
