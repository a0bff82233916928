"""The configuration's rules, as a user meets them: values in, one frozen object or one clear message out."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.schema import ConfigError, PipelineConfig, load, replica_environment

MODEL: dict[str, Any] = {"model": "builtin:tiny-qwen2-vl"}
BEYOND_LOOPBACK = {"advertise_host": "auto", "peer_networks": ["10.0.0.0/8"]}


def config(*, cluster: dict[str, Any] | None = None, **model: Any) -> PipelineConfig:
    return load({"models": [MODEL | model], "cluster": cluster or {}})


def message(values: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        load(values)
    return str(caught.value)


def test_defaults_serve_a_builtin_model_on_loopback() -> None:
    loaded = config()
    assert loaded.models[0].served_name == "builtin:tiny-qwen2-vl"
    assert Path(loaded.models[0].checkpoint).name == "tiny-qwen2-vl"
    assert loaded.cluster.is_loopback
    assert loaded.cluster.secret() is None


def test_nothing_can_be_changed_after_loading() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config().models[0].prefill.num_replicas = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ({"num_replicas": 0}, "models[0].prefill.num_replicas: must be >= 1, got 0"),
        ({"num_replica": 1}, "models[0].prefill.num_replica: unknown key; did you mean 'num_replicas'?"),
        ({"receiver_cache": 1}, "models[0].prefill.receiver_cache: unknown key; did you mean 'receiver_cache_bytes'?"),
        ({"pipeline_parallel_size": 2}, "models[0].prefill.pipeline_parallel_size: must be 1, got 2: "),
        ({"num_replicas": "two"}, "models[0].prefill.num_replicas: expected a whole number, got 'two'"),
        ({"slab_bytes": "1 parsec"}, "models[0].prefill.slab_bytes: expected bytes"),
        ({"slab_bytes": "1MiB"}, "slab_bytes (1048576) must exceed inflight_bytes (16777216)"),
        ({"max_num_batched_tokens": 8}, "max_num_batched_tokens (8) must be >= max_num_seqs (32)"),
        ({"gpu_memory_utilization": 1.5}, "models[0].prefill.gpu_memory_utilization: must be <= 1.0, got 1.5"),
        ({"num_gpus": 1.5}, "num_gpus (1.5) must be a fraction below 1 or a whole number"),
        ({"num_gpus": 2}, "tensor_parallel_size (1) must equal num_gpus (2)"),
        ({"num_gpus": 0.5, "tensor_parallel_size": 2}, "tensor_parallel_size (2) must equal num_gpus (0.5)"),
        (
            {"num_gpus": 0.5, "gpu_memory_utilization": 0.6},
            "(0.6) must not exceed num_gpus (0.5)",
        ),
        ({"num_gpus": 1}, "all stages of a model must use the same kind of device"),
        ({"resources": {"prefill": 0}}, "models[0].prefill.resources.prefill: must be > 0"),
        ({"request_timeout_s": float("nan")}, "unknown key"),
        ({"health_check_period_s": float("inf")}, "models[0].prefill.health_check_period_s: "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_stage_that_cannot_work_is_refused(stage: dict[str, Any], expected: str) -> None:
    assert expected in message({"models": [MODEL | {"prefill": stage}]})


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"num_replicas": 2, "autoscaling": {"max_replicas": 3, "target_ongoing_requests": 2}}, "not both"),
        (
            {"autoscaling": {"max_replicas": 1, "min_replicas": 2, "target_ongoing_requests": 2}},
            "(1) must be >= min",
        ),
        ({"autoscaling": {"max_replicas": 2, "target_ongoing_requests": 65}}, "or no replica is ever added"),
        ({"autoscaling": {"max_replicas": 2}}, "target_ongoing_requests: required, but missing"),
    ],
)
def test_scaling_that_contradicts_itself_is_refused(scaling: dict[str, Any], expected: str) -> None:
    assert expected in message({"models": [MODEL | {"decode": scaling}]})


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (
            {"model": "builtin:tiny-qwen9"},
            "models[0].model: unknown built-in model 'builtin:tiny-qwen9'; known: ",
        ),
        ({"model": "./no/such/place"}, "models[0].model: no checkpoint at ./no/such/place"),
        ({"block_size": 16}, "block_size (16) must be a multiple of 32 on the CPU"),
        ({"dtype": "int3"}, "models[0].dtype: must be one of 'auto', 'bfloat16', 'float16' or 'float32', got 'int3'"),
        ({"chat_template": "/no/such/file"}, "models[0].chat_template: no file at /no/such/file"),
        ({"admission": {"stricter": {"image": "lax"}}}, "models[0].admission.stricter.image: must be one of"),
        ({"trust_remote_code": "maybe"}, "models[0].trust_remote_code: expected true or false"),
    ],
)
def test_a_model_that_cannot_work_is_refused(model: dict[str, Any], expected: str) -> None:
    assert expected in message({"models": [MODEL | model]})


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        (BEYOND_LOOPBACK, "cluster_secret_file is required beyond loopback"),
        ({"peer_networks": ["127.0.0.0/8", "10.0.0.0/8"]}, "openssl rand -hex 32 > FILE"),
        ({"advertise_host": "10.1.2.3", "cluster_secret_file": "/x"}, "lies in none of peer_networks"),
        ({"peer_networks": ["10.0.0.0/99"]}, "expected a network such as 10.0.0.0/16"),
        ({"peer_networks": []}, "cluster.peer_networks"),
        (
            {"encoding_transfer": {"pin_lease_s": 40}},
            "(40) must exceed read_deadline_s + quarantine_s (40)",
        ),
        ({"encoding_transfer": {"pin_lease_s": 41}}, "less time than clock_skew_s"),
        ({"kv_lease_s": 5}, "handoff_margin_s (5) < kv_lease_s (5)"),
        ({"handoff_margin_s": 0.5}, "clock_skew_s (1) < handoff_margin_s (0.5)"),
        ({"side_channel_port_range": [3000, 2000]}, "the first port must not exceed the last"),
        ({"side_channel_port_range": [80, 2000]}, "cluster.side_channel_port_range[0]: must be >= 1024, got 80"),
    ],
)
def test_a_cluster_that_cannot_work_is_refused(cluster: dict[str, Any], expected: str) -> None:
    assert expected in message({"models": [MODEL], "cluster": cluster})


def test_models_must_be_there_and_differ_in_name() -> None:
    assert message({"models": []}) == "models: give at least one"
    assert "served twice" in message({"models": [MODEL, MODEL]})
    assert len(load({"models": [MODEL, MODEL | {"name": "other"}]}).models) == 2


def test_all_mistakes_are_named_at_once() -> None:
    lines = message({"models": [MODEL | {"nam": "x", "encoder": {"num_cpus": -1}}], "clustr": {}}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["models[0].encoder.num_cpus", "models[0].nam", "clustr"]


def test_sizes_take_units() -> None:
    prefill = config(prefill={"slab_bytes": "1GiB", "inflight_bytes": 4096}).models[0].prefill
    assert (prefill.slab_bytes, prefill.inflight_bytes) == (1 << 30, 4096)


def test_the_secret_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    cluster = config(cluster=BEYOND_LOOPBACK | {"cluster_secret_file": str(file)}).cluster
    with pytest.raises(ConfigError, match="cannot read"):
        cluster.secret()
    file.write_text("short\n")
    with pytest.raises(ConfigError, match="holds 5 bytes, at least 16 are needed"):
        cluster.secret()
    file.write_text("0123456789abcdef\n")
    assert cluster.secret() == b"0123456789abcdef"


def test_a_local_checkpoint_becomes_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path.parent)
    loaded = config(model=f"./{tmp_path.name}").models[0]
    assert (loaded.checkpoint, loaded.is_local) == (str(tmp_path), True)


def test_replicas_stay_off_the_hub_only_when_all_models_are_local() -> None:
    assert replica_environment(config())["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in replica_environment(config(model="some/model"))


def test_thread_settings_are_for_the_cpu_only() -> None:
    gpu = {stage: {"num_gpus": 1} for stage in ("encoder", "prefill", "decode")}
    assert "VLLM_CPU_OMP_THREADS_BIND" in replica_environment(config())
    assert "VLLM_CPU_OMP_THREADS_BIND" not in replica_environment(config(**gpu))


@pytest.mark.parametrize(
    ("stage", "expected"),
    [({}, 0.05), ({"num_gpus": 1}, 0.9), ({"num_gpus": 0.5}, 0.45), ({"gpu_memory_utilization": 0.2}, 0.2)],
)
def test_an_engine_takes_only_its_share_of_memory(stage: dict[str, Any], expected: float) -> None:
    stages = dict.fromkeys(("encoder", "prefill", "decode"), stage)
    assert config(**stages).models[0].decode.memory_utilization == pytest.approx(expected)


def test_serve_is_given_either_a_number_or_a_range_of_replicas() -> None:
    scaling = {"max_replicas": 3, "target_ongoing_requests": 2}
    fixed = config(decode={"num_replicas": 2, "resources": {"decode": 1}}).models[0].decode.stage_options()
    ranged = config(decode={"autoscaling": scaling}).models[0].decode.stage_options()
    assert fixed["num_replicas"] == 2
    assert fixed["ray_actor_options"] == {"num_cpus": 0.5, "resources": {"decode": 1}}
    assert "num_replicas" not in ranged
    assert ranged["autoscaling_config"]["max_replicas"] == 3


def test_a_file_may_hold_a_serve_config_or_the_values_alone(tmp_path: Path) -> None:
    bare, serve = tmp_path / "bare.yaml", tmp_path / "serve.yaml"
    bare.write_text("models: [{model: 'builtin:tiny-llava'}]")
    serve.write_text("applications: [{args: {models: [{model: 'builtin:tiny-llava'}]}}]")
    assert load(bare) == load(str(serve))


@pytest.mark.parametrize("content", ["applications: []", "applications: [1, 2]", "a: [", "\t", "just text"])
def test_a_file_without_a_configuration_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError):
        load(file)
