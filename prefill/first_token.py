"""When prefill's own token may begin the answer, with decode continuing from the prompt and that token.

vLLM's decode side asks for the KV of as many tokens as its prompt has, one more than prefill computed. That is harmless
while the extra token lies in the last, partly filled block that is pulled anyway: decode computes it again before it
samples. Where the prompt ends with a block, the extra token needs a block that prefill does not have: the read is then
shifted by one block, silently, or kills the engine. One token short of a block's end, decode would enter the block in
its prefix cache before the last token's KV is there. Both measured on vLLM 0.32; the pipeline's tests run each length.
"""

from __future__ import annotations

from vllm.config import ModelConfig
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from serving.engine_input import remembers_answer
from serving.protocol import DecodeChunk

__all__ = ["first_chunk", "hands_over_whole_prompts", "prefill_token_counts"]


def hands_over_whole_prompts(model: ModelConfig) -> bool:
    """Whether prefill computes a prompt to its end and hands over plain blocks of it.

    Models with recurrent state stop one token early, and windowed or compressed attention lays blocks out otherwise:
    continuing from prefill's token is unproven there.
    """
    return not (
        model.is_hybrid
        or model.is_attention_free
        or model.has_inner_state
        or model.use_mla
        or model.get_sliding_window() is not None
    )


def prefill_token_counts(sampling: SamplingParams, num_prompt_tokens: int, block_size: int | None) -> bool:
    """Whether prefill's token is the one that a single engine would have sampled, and decode can go on from it.

    Stop strings may span the first token and later ones, which decode would not notice; `min_tokens` and everything
    that looks at earlier output would have to be told of it. Biases and allowed tokens apply to each step alike.
    """
    if block_size is None or num_prompt_tokens % block_size in (0, block_size - 1):
        return False
    return (
        sampling.temperature == 0
        and not sampling.stop
        and sampling.min_tokens == 0
        and (sampling.skip_special_tokens or sampling.spaces_between_special_tokens)
        and not remembers_answer(sampling)
    )


def first_chunk(output: RequestOutput, sampling: SamplingParams) -> DecodeChunk | None:
    """Prefill's token as the answer's first chunk; None when decode has to sample it after all.

    A token without text may be the beginning of a character. Only the detokenizer that saw it could finish that.

    Args:
        output: Prefill's last output: one token.
        sampling: The client's own parameters.
    """
    completion = output.outputs[0]
    is_whole = completion.finish_reason == "stop" or sampling.max_tokens == 1
    if not (is_whole or completion.text or not sampling.detokenize):
        return None
    return DecodeChunk(
        text=completion.text,
        token_ids=tuple(completion.token_ids),
        finished=is_whole,
        finish_reason=completion.finish_reason if is_whole else None,
        stop_reason=completion.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        weight_version=completion.weight_versions[-1].version if completion.weight_versions else None,
    )
