"""What the pipeline streams, as the outputs that vLLM's front expects from an engine."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput, WeightVersionSpan
from vllm.sampling_params import RequestOutputKind

from serving.protocol import DecodeChunk, Logprobs
from serving.stages import Report

PositionLogprobs = list[dict[int, Logprob] | None]


class Choice:
    """One of a request's `n` answers, put together from its chunks.

    Args:
        index: Its place among the answers.
        keep: Whether the whole answer will be asked for; otherwise nothing is kept beyond the last chunk.
    """

    def __init__(self, index: int, *, keep: bool) -> None:
        self._index = index
        self._keep = keep
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: PositionLogprobs = []
        self._last: DecodeChunk | None = None
        self._count = 0

    @property
    def is_finished(self) -> bool:
        return self._last is not None and self._last.finished

    def add(self, chunk: DecodeChunk) -> None:
        self._last = chunk
        self._count += len(chunk.token_ids)
        if self._keep:
            self._text.append(chunk.text)
            self._token_ids += chunk.token_ids
            self._logprobs += vllm_logprobs(chunk.logprobs) or []

    def abort(self) -> None:
        """End the answer where it stands."""
        cumulative = None if self._last is None else self._last.cumulative_logprob
        self.add(DecodeChunk("", (), finished=True, cumulative_logprob=cumulative, finish_reason="abort"))

    def last(self) -> CompletionOutput:
        """What the last chunk added."""
        chunk = self._last or DecodeChunk("", (), finished=False)
        return self._completion(chunk, chunk.text, list(chunk.token_ids), vllm_logprobs(chunk.logprobs))

    def whole(self) -> CompletionOutput:
        """Everything so far."""
        chunk = self._last or DecodeChunk("", (), finished=False)
        return self._completion(chunk, "".join(self._text), list(self._token_ids), list(self._logprobs) or None)

    def _completion(
        self, chunk: DecodeChunk, text: str, token_ids: list[int], logprobs: PositionLogprobs | None
    ) -> CompletionOutput:
        return CompletionOutput(
            index=self._index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=chunk.cumulative_logprob,
            logprobs=logprobs,
            finish_reason=chunk.finish_reason,
            stop_reason=chunk.stop_reason,
            weight_versions=self._weight_versions(chunk.weight_version),
        )

    def _weight_versions(self, version: str | None) -> list[WeightVersionSpan] | None:
        """One span over the answer: the weights of a running stage do not change."""
        return [WeightVersionSpan(version, 0, self._count)] if version is not None and self._count else None


class Answer:
    """All answers of one request: turns chunks into `RequestOutput`s of the kind that the caller asked for.

    Args:
        request_id: The caller's own id.
        prompt_token_ids: The prompt, which every output repeats.
        kind: What the caller asked for.
        count: Number of answers.
    """

    def __init__(self, request_id: str, prompt_token_ids: Sequence[int], kind: RequestOutputKind, count: int) -> None:
        self._request_id = request_id
        self._prompt_token_ids = list(prompt_token_ids)
        self._is_delta = kind is RequestOutputKind.DELTA
        self._is_final_only = kind is RequestOutputKind.FINAL_ONLY
        self._choices = [Choice(index, keep=not self._is_delta) for index in range(count)]
        self._report: Report | None = None
        self._prompt_logprobs_sent = False

    @property
    def is_finished(self) -> bool:
        return all(choice.is_finished for choice in self._choices)

    def begin(self, report: Report) -> None:
        """Take the first answer's report; those of its siblings tell of caches that it filled."""
        self._report = self._report or report

    def add(self, index: int, chunk: DecodeChunk) -> RequestOutput | None:
        """The output that `chunk` (what is new) completes; None when the caller wants to hear only the end."""
        choice = self._choices[index]
        choice.add(chunk)
        if self._is_final_only:
            return self._output(self._choices) if self.is_finished else None
        return self._output([choice])

    def abort(self) -> RequestOutput:
        """The last output of a request that was aborted: what had not finished ends here."""
        unfinished = [choice for choice in self._choices if not choice.is_finished]
        for choice in unfinished:
            choice.abort()
        return self._output(unfinished if self._is_delta else self._choices)

    def _output(self, choices: Sequence[Choice]) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=None,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[choice.last() if self._is_delta else choice.whole() for choice in choices],
            finished=self.is_finished,
            num_cached_tokens=None if self._report is None else self._report.num_cached_tokens,
            num_cache_creation_tokens=None if self._report is None else self._report.num_created_cache_tokens,
        )

    def _prompt_logprobs(self) -> PositionLogprobs | None:
        """Those of the prompt: in a stream of deltas only once."""
        if self._report is None or (self._prompt_logprobs_sent and self._is_delta):
            return None
        self._prompt_logprobs_sent = True
        return vllm_logprobs(self._report.prompt_logprobs)


def vllm_logprobs(positions: Logprobs | None) -> PositionLogprobs | None:
    """Logprobs as vLLM keeps them. The inverse of `serving.engine.wire_logprobs`."""
    if positions is None:
        return None
    return [
        None if position is None else {p.token_id: Logprob(p.logprob, p.rank, p.decoded) for p in position}
        for position in positions
    ]
