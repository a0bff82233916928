"""The text of an answer that another engine goes on with, written by vLLM's own detokenizer.

An engine that continues an answer takes its beginning for prompt: it would lose a character whose bytes were half
there, a stop string that began before, and text that was held back for one. So the engine is asked for tokens only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from serving.engine_input import decode_sampling
from serving.protocol import DecodeChunk
from serving.stages import PipelineRequest

__all__ = ["TextContinuation"]


class TextContinuation:
    """Writes on.

    Args:
        tokenizer: The model's.
        request: What is answered.
        token_ids: The answer's tokens so far.
        text: The text of it that the client has been given.
    """

    def __init__(self, tokenizer: Any, request: PipelineRequest, token_ids: Sequence[int], text: str) -> None:
        sampling = decode_sampling(request.sampling)
        self._detokenizer = IncrementalDetokenizer.from_new_request(
            tokenizer if sampling.detokenize else None,
            EngineCoreRequest(
                request_id=request.request_id,
                prompt_token_ids=list(request.token_ids),
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            ),
        )
        self._told = len(text)
        for token in token_ids:
            self._detokenizer.update([token], False)

    def add(self, chunk: DecodeChunk) -> DecodeChunk:
        """`chunk` with its text, ended at the first stop string.

        Token by token, as an engine does: whether a stop string is complete is asked after each.
        """
        for place, token in enumerate(chunk.token_ids, start=1):
            ends_here = chunk.finish_reason == "stop" and place == len(chunk.token_ids)
            stop = self._detokenizer.update([token], ends_here)
            if stop is not None:
                return msgspec.structs.replace(
                    chunk,
                    text=self._new_text(finished=True),
                    token_ids=chunk.token_ids[:place],
                    finished=True,
                    finish_reason="stop",
                    stop_reason=stop,
                )
        return msgspec.structs.replace(chunk, text=self._new_text(finished=chunk.finished))

    def _new_text(self, *, finished: bool) -> str:
        text: str = self._detokenizer.get_next_output_text(finished, delta=False)
        new = text[self._told :]
        self._told += len(new)
        return new
