"""The front-end half of vLLM for one model: configuration, tokenizer, processors. No engine, no device.

What `vllm launch render` builds, with three differences whose reasons stand at their lines.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Collection

import msgspec
from vllm.config import ECTransferConfig, VllmConfig
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.renderers import renderer_from_config
from vllm.renderers.hf import resolve_chat_template
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.input_processor import InputProcessor


class FrontModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model as its front sees it.

    Args:
        name: What clients send as `model`.
        checkpoint: Directory or hub name, as vLLM takes it.
        max_num_seqs: Sequences of one decode step; the most answers (`n`) that one request may ask for.
        max_num_batched_tokens: Rows of the smallest encoder cache among the stages: no larger item is accepted.
        limit_mm_per_prompt: Items per prompt, by modality.
        allowed_media_domains: Hosts from which media may be fetched; see `serving/media.py`.
        trust_request_mm_kwargs: Whether requests may say how their media are processed.
        trust_request_chat_template: Whether requests may bring a chat template.
        tool_call_parser: Also lets the model decide to call tools.
        media_cache_bytes: Memory for processed media in this process, so that a repeated image is rendered once.
    """

    name: str
    checkpoint: str
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    limit_mm_per_prompt: dict[str, int] = {}
    trust_remote_code: bool = False
    trust_request_mm_kwargs: bool = False
    trust_request_chat_template: bool = False
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    allowed_media_domains: tuple[str, ...] = ()
    media_cache_bytes: int = 1 << 30


class ModelFront:
    """Builds what renders prompts of one model and checks their parameters. Takes seconds; fetches no weights."""

    def __init__(self, model: FrontModel) -> None:
        self.model = model
        self.args = _arguments(model)
        engine_args = AsyncEngineArgs.from_cli_args(self.args)
        self.vllm_config = _vllm_config(engine_args, model)
        self.renderer = renderer_from_config(self.vllm_config)
        self.input_processor = InputProcessor(self.vllm_config, self.renderer)
        self._metadata = PlaceholderMetadataResolver(self.vllm_config.model_config)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model's prompts are conversations."""
        if self.model.chat_template is not None:
            return True
        config = self.vllm_config.model_config
        return resolve_chat_template(self.renderer.tokenizer, None, None, model_config=config) is not None

    def metadata_fields(self, modality: str) -> Collection[str]:
        """Names of the fields that position set-up needs of an item, as the model declares them."""
        fields: Collection[str] = self._metadata.fields_for(modality)
        return fields


def _vllm_config(engine_args: AsyncEngineArgs, model: FrontModel) -> VllmConfig:
    """A configuration without device, cache or parallelism checks: an ingress node has no accelerator."""
    config = VllmConfig(
        model_config=engine_args.create_model_config(),
        structured_outputs_config=engine_args.create_structured_outputs_config(),
        # Without a consumer role the renderer refuses `image_embeds` that bring metadata and no embeddings.
        ec_transfer_config=ECTransferConfig(ec_connector="front", ec_role="ec_consumer"),
    )
    # Selects the cache that keeps processed tensors here. The default one drops tensors that it believes the
    # engine has; with none at all, item hashes become request-local.
    config.parallel_config._api_process_count = 2
    config.scheduler_config.max_num_seqs = model.max_num_seqs
    config.scheduler_config.max_num_batched_tokens = model.max_num_batched_tokens
    config.scheduler_config.max_num_encoder_input_tokens = model.max_num_batched_tokens
    config.scheduler_config.encoder_cache_size = model.max_num_batched_tokens
    return config


def _arguments(model: FrontModel) -> Namespace:
    """What `vllm serve` would have been called with."""
    options: dict[str, object] = {
        "model": model.checkpoint,
        "served-model-name": model.name,
        "dtype": model.dtype,
        "revision": model.revision,
        "tokenizer": model.tokenizer,
        "max-model-len": model.max_model_len,
        "limit-mm-per-prompt": json.dumps(model.limit_mm_per_prompt) if model.limit_mm_per_prompt else None,
        "mm-processor-cache-gb": model.media_cache_bytes / 2**30,
        "chat-template": model.chat_template,
        "tool-call-parser": model.tool_call_parser,
        "reasoning-parser": model.reasoning_parser,
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    words += ["--enable-scale-out", "--disable-log-stats", "--enable-prompt-tokens-details"]
    trusted = {
        "--trust-remote-code": model.trust_remote_code,
        "--trust-request-mm-kwargs": model.trust_request_mm_kwargs,
        "--trust-request-chat-template": model.trust_request_chat_template,
    }
    words += [word for word, is_trusted in trusted.items() if is_trusted]
    words += ["--enable-auto-tool-choice"] if model.tool_call_parser else []
    words += ["--allowed-media-domains", *model.allowed_media_domains] if model.allowed_media_domains else []
    arguments: Namespace = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    return arguments
