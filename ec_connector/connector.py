"""The class that vLLM loads: `ec_connector="TriptychECConnector"`, `ec_connector_module_path="ec_connector.connector"`.

One instance lives in the scheduler and one in each worker. This file builds the right half and forwards.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata, ECConnectorRole
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.encoder_budget import MultiModalBudget
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from ec_connector.agent import Agent, link_to
from ec_connector.config import ECConfig, check_slab_size, parse_config
from ec_connector.gate import Gate
from ec_connector.metrics import ECPromMetrics, ECStats
from ec_connector.protocol import compatibility_hash
from ec_connector.scheduler import ECScheduler, Outputs, StepMetadata
from ec_connector.slab import Slab
from ec_connector.worker import ECWorker


class TriptychECConnector(ECConnectorBase):  # type: ignore[misc]
    """Encoder-cache transfer over NIXL."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        config = parse_config(vllm_config.ec_transfer_config.ec_connector_extra_config)
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("pipeline parallelism is not supported: vLLM calls the EC hooks on its first rank only")
        self._scheduler: ECScheduler | None = None
        self._worker: ECWorker | None = None
        if role == ECConnectorRole.SCHEDULER:
            self._scheduler = _build_scheduler(vllm_config, config)
        else:
            self._worker = _build_worker(vllm_config, config)

    @property
    def scheduler(self) -> ECScheduler:
        if self._scheduler is None:
            raise RuntimeError("the scheduler's half was called in a worker")
        return self._scheduler

    @property
    def worker(self) -> ECWorker:
        if self._worker is None:
            raise RuntimeError("the worker's half was called in the scheduler")
        return self._worker

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.agent.stop()
        if self._scheduler is not None:
            self._scheduler.close()

    # --- worker -----------------------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self.worker.start_load_caches(encoder_cache, self._step())

    def start_save_caches(self, **kwargs: Any) -> None:
        self.worker.start_save_caches(kwargs["encoder_cache"], self._step())

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        if self.is_producer:
            self.worker.save(mm_hash, encoder_cache[mm_hash])

    def _step(self) -> StepMetadata:
        metadata: ECConnectorMetadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    # --- scheduler --------------------------------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        return self.scheduler.has_cache_item(identifier)

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self.scheduler.ensure_cache_available(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        return self.scheduler.take_unavailable_requests()

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self.scheduler.update_state_after_alloc(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        return self.scheduler.build_connector_meta(scheduler_output)

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        return False, self.scheduler.request_finished(request)

    def get_ec_connector_stats(self) -> ECStats | None:
        counts = None if self._scheduler is None else self._scheduler.take_counts()
        return None if counts is None else ECStats(data=counts)

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ECStats | None:
        return ECStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[Any], type[Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ECPromMetrics:
        return ECPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _build_scheduler(vllm_config: VllmConfig, config: ECConfig) -> ECScheduler:
    ec = vllm_config.ec_transfer_config
    budget = MultiModalBudget(vllm_config, MULTIMODAL_REGISTRY, enable_cache=False)
    if ec.is_ec_consumer:
        check_slab_size(config, cache_rows=budget.encoder_cache_size, row_bytes=_widest_row_bytes(vllm_config))
    # A pure producer keeps one copy, at rank 0; where items are also loaded, every rank keeps its own.
    ranks = vllm_config.parallel_config.tensor_parallel_size if ec.is_ec_consumer else 1
    links = [link_to(ec.engine_id, rank, config.secret) for rank in range(ranks)]
    gate = Gate(links, loads=ec.is_ec_consumer)
    gate.await_agents()
    model = vllm_config.model_config
    resolver = PlaceholderMetadataResolver(model)
    for modality in budget.mm_limits:
        resolver.fields_for(modality)  # builds vLLM's processor: seconds that no request shall wait for
    return ECScheduler(
        gate,
        resolver,
        Outputs(dict(ec.mm_encoder_output_widths), _dtype_name(vllm_config), model.dtype.itemsize),
        is_producer=ec.is_ec_producer,
        is_consumer=ec.is_ec_consumer,
    )


def _build_worker(vllm_config: VllmConfig, config: ECConfig) -> ECWorker:
    ec, model = vllm_config.ec_transfer_config, vllm_config.model_config
    device = torch.device("cuda", torch.cuda.current_device()) if current_platform.is_cuda() else torch.device("cpu")
    slab = Slab(config.slab_bytes, device)
    dtype = _dtype_name(vllm_config)
    rank = get_tensor_model_parallel_rank()
    agent = Agent(
        config,
        slab,
        engine_id=ec.engine_id,
        rank=rank,
        ranks=vllm_config.parallel_config.tensor_parallel_size,
        compatibility=compatibility_hash(model=model.model, revision=model.revision, dtype=dtype),
        dtype=dtype,
    )
    agent.start()
    return ECWorker(agent, slab, saves=rank == 0 or ec.is_ec_consumer)


def _dtype_name(vllm_config: VllmConfig) -> str:
    return str(vllm_config.model_config.dtype).removeprefix("torch.")


def _widest_row_bytes(vllm_config: VllmConfig) -> int:
    """Bytes of the widest row of encoder output.

    Producers have measured it. For others it is the language model's width, times the levels that DeepStack
    models pack side by side.
    """
    model = vllm_config.model_config
    width = model.get_inputs_embeds_size()
    vision = getattr(model.hf_config, "vision_config", None)
    levels = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    measured = vllm_config.ec_transfer_config.mm_encoder_output_widths.values()
    return int(max([width * levels, *measured]) * model.dtype.itemsize)
