"""The composition root: from a configuration to a Serve application. The one file that knows every stage.

`serve run configs/pipeline.yaml` calls `build` with the file's `args`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from configs.schema import DeploymentConfig, ModelConfig, PipelineConfig, StageConfig, load, replica_environment
from decode.server import DecodeServer
from encoders.server import CheckItem, EncoderServer
from prefill.admission import Admission, FeatureRequirement, check
from prefill.derive import requirement_of
from prefill.server import CheckRequest, PrefillServer
from serving.continuation import TextContinuation
from serving.engine import Engine, EngineSettings, Role
from serving.engine_input import traits_of
from serving.exporting import spans_to
from serving.handles import DecodeHandle, EncodeHandle, PrefillHandle
from serving.ingress import Ingress, MediaLimits, ServedPipeline
from serving.limits import Limits
from serving.metrics import PipelineMetrics
from serving.pipeline import Pipeline
from serving.protocol import EncodeRequest, PrefillRequest, ResolvedItem
from serving.references import ReferenceSigner
from serving.render import FrontModel, ModelFront
from serving.replica_metrics import EncoderCacheMetrics
from serving.routers import BoundedAffinityRouter
from serving.stages import PipelineRequest
from serving.tracing import RequestTrace
from serving.traits import ModelTraits

_FALLBACK_REPLICAS = 7


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application for a configuration.

    Raises:
        ConfigError: Naming every wrong key and what would be right; Serve reports it as the application's failure.
    """
    config = load(args)
    secret = config.cluster.secret() or secrets.token_bytes(32)
    environment = replica_environment(config)
    handles = {model.served_name: _stages(model, config, secret, environment) for model in config.models}
    ingress = serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        request_router_config=_affinity(),
        **_options(config.ingress, config.ingress.serve_options(), environment),
    )
    bound: serve.Application = ingress.bind(
        [_front_model(model, config) for model in config.models],
        partial(_make_pipeline, config, secret, handles),
        MediaLimits(config.media.allowed_domains, config.media.max_download_bytes),
        config.ingress.request_timeout_s,
    )
    return bound


def _stages(
    model: ModelConfig, config: PipelineConfig, secret: bytes, environment: Mapping[str, str]
) -> dict[Role, serve.Application]:
    """The three deployments of one model, bound."""
    signer = partial(_make_signer, config, secret)
    settings = {role: partial(_engine_settings, role, model, config, secret) for role in Role}
    encoder = _deployment(EncoderServer, Role.ENCODE, model, model.encoder, environment)
    prefill = _deployment(PrefillServer, Role.PREFILL, model, model.prefill, environment)
    decode = _deployment(DecodeServer, Role.DECODE, model, model.decode, environment)
    return {
        Role.ENCODE: encoder.bind(settings[Role.ENCODE], signer, partial(_make_item_check, model)),
        Role.PREFILL: prefill.bind(settings[Role.PREFILL], signer, partial(_make_request_check, model, signer)),
        Role.DECODE: decode.bind(settings[Role.DECODE], signer, model.decode.stream_interval_s),
    }


def _deployment(
    server: type, role: Role, model: ModelConfig, stage: StageConfig, environment: Mapping[str, str]
) -> serve.Deployment:
    options = _options(stage, stage.stage_options(), environment)
    if role is Role.DECODE:
        # More would wait inside the engine, where neither other replicas nor the bounded queue could take them.
        options["max_ongoing_requests"] = min(stage.max_ongoing_requests, stage.max_num_seqs)
    else:
        options["request_router_config"] = _affinity()
    deployment: serve.Deployment = serve.deployment(server).options(name=f"{model.served_name}-{role}", **options)
    return deployment


def _affinity() -> RequestRouterConfig:
    return RequestRouterConfig(
        request_router_class=BoundedAffinityRouter,
        request_router_kwargs={"num_fallback_replicas": _FALLBACK_REPLICAS},
    )


def _options(deployment: DeploymentConfig, options: dict[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    actor = dict(options["ray_actor_options"], runtime_env={"env_vars": dict(environment)})
    return options | {"ray_actor_options": actor}


def _front_model(model: ModelConfig, config: PipelineConfig) -> FrontModel:
    return FrontModel(
        name=model.served_name,
        checkpoint=model.checkpoint,
        revision=model.revision,
        dtype=model.dtype,
        max_model_len=model.max_model_len,
        max_num_seqs=model.decode.max_num_seqs,
        max_num_batched_tokens=_smallest_encoder_cache(model),
        limit_mm_per_prompt=model.limit_mm_per_prompt.model_dump(),
        trust_remote_code=model.trust_remote_code,
        trust_request_mm_kwargs=model.trust_request_mm_kwargs,
        trust_request_chat_template=model.trust_request_chat_template,
        chat_template=model.chat_template,
        tool_call_parser=model.tool_call_parser,
        reasoning_parser=model.reasoning_parser,
        allowed_media_domains=config.media.allowed_domains,
        media_cache_bytes=config.ingress.media_cache_bytes,
    )


# What follows runs in the replicas.


def _engine_settings(role: Role, model: ModelConfig, config: PipelineConfig, secret: bytes) -> EngineSettings:
    advertised = config.cluster.advertise_host
    host = ray.util.get_node_ip_address() if advertised == "auto" else advertised
    return EngineSettings(
        role,
        model,
        config.cluster,
        secret,
        host,
        on_death=_end_replica,
        traces_endpoint=config.tracing.otlp_endpoint,
        stat_loggers=(EncoderCacheMetrics,),
    )


def _end_replica() -> None:
    """End this process at once: a dead engine looks idle, and routers would send it all that is tried again."""
    os._exit(1)


def _make_signer(config: PipelineConfig, secret: bytes) -> ReferenceSigner:
    cluster = config.cluster
    return ReferenceSigner(
        secret,
        lifetime_s=cluster.encoding_transfer.reference_lifetime_s,
        peer_networks=cluster.peer_networks,
        clock_skew_s=cluster.clock_skew_s,
    )


def _make_pipeline(
    config: PipelineConfig,
    secret: bytes,
    handles: Mapping[str, Mapping[Role, DeploymentHandle]],
    front: ModelFront,
) -> ServedPipeline:
    model = next(model for model in config.models if model.served_name == front.model.name)
    stages = handles[model.served_name]
    traits = traits_of(front.vllm_config.model_config)
    requirement = replace(_requirement(model, traits), refuse_unchecked=True).stricter(model.admission.stricter)
    signer = _make_signer(config, secret)

    def admit(request: PipelineRequest, held: Mapping[str, ResolvedItem] | None) -> Admission:
        return check(
            requirement,
            request.token_ids,
            request.features,
            request.refs,
            cache_salt=request.cache_salt,
            verify=lambda ref: signer.verify(ref, cache_salt=request.cache_salt),
            held=held,
            rendered=request.rendered,
        )

    tracer = spans_to(config.tracing.otlp_endpoint, config.tracing.protocol).get_tracer("triptych")
    max_grpc_bytes = config.cluster.max_grpc_bytes
    encoder = EncodeHandle(stages[Role.ENCODE], max_grpc_bytes)
    decoder = DecodeHandle(stages[Role.DECODE], max_grpc_bytes, model.decode.max_queued_requests)
    prefiller = PrefillHandle(stages[Role.PREFILL], max_grpc_bytes, decoder.reject)
    pipeline = Pipeline(
        encoder,
        prefiller,
        decoder,
        check=admit,
        continue_from=partial(TextContinuation, front.renderer.tokenizer),
        limits=Limits(config.ingress.max_ongoing_requests, config.ingress.max_queued_requests),
        metrics=PipelineMetrics(model.served_name),
        trace=lambda request: RequestTrace(tracer, request.trace_headers, request.request_id, model.served_name),
        handoff_margin_s=config.cluster.handoff_margin_s,
    )

    async def check_stages() -> None:
        for stage in (encoder, prefiller, decoder):
            await stage.check_health()

    return ServedPipeline(pipeline, check_stages, lambda ref, cache_salt: signer.verify(ref, cache_salt=cache_salt))


def _make_item_check(model: ModelConfig, engine: Engine) -> CheckItem:
    requirement = _requirement(model, traits_of(engine.llm.model_config))

    def check_item(request: EncodeRequest) -> None:
        check(
            requirement,
            request.token_ids,
            (request.feature,),
            {},
            cache_salt=request.cache_salt,
            verify=lambda ref: False,
        )

    return check_item


def _make_request_check(model: ModelConfig, make_signer: Callable[[], ReferenceSigner], engine: Engine) -> CheckRequest:
    requirement = replace(_requirement(model, traits_of(engine.llm.model_config)), refuse_unchecked=True)
    signer = make_signer()

    def check_request(request: PrefillRequest, held: Mapping[str, ResolvedItem]) -> Admission:
        return check(
            requirement,
            request.token_ids,
            request.features,
            request.refs,
            cache_salt=request.cache_salt,
            verify=lambda ref: signer.verify(ref, cache_salt=request.cache_salt),
            held=held,
        )

    return check_request


def _requirement(model: ModelConfig, traits: ModelTraits) -> FeatureRequirement:
    return requirement_of(traits, model=model.served_name, max_rows_per_item=_smallest_encoder_cache(model))


def _smallest_encoder_cache(model: ModelConfig) -> int:
    """Rows that every stage's encoder cache holds: vLLM sizes it by the tokens of one step."""
    return min(stage.max_num_batched_tokens for stage in model.stages.values())
