"""Chat requests to which both servers must answer alike."""

from __future__ import annotations

from typing import Any

from tests.parity.media import QUESTION, film, image, user, video

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 7, "max_tokens": 16}
COLOUR = {"type": "string", "enum": ["red", "green", "blue"]}
SCHEMA = {
    "type": "object",
    "properties": {"colour": COLOUR, "shape": {"type": "string", "enum": ["circle", "square"]}},
    "required": ["colour", "shape"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paint the wall.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"colour": COLOUR},
            "required": ["colour"],
            "additionalProperties": False,
        },
    },
}
OTHER_TOOL = {"type": "function", "function": {**TOOL["function"], "name": "wash"}}  # type: ignore[dict-item]
TURNS = [
    {"role": "system", "content": "Answer in few words."},
    {"role": "user", "content": "Count to five."},
    {"role": "assistant", "content": "one two three four five"},
    {"role": "user", "content": "Count down from three."},
]
LONG = "the quick brown fox jumps over the lazy dog " * 40


def _extra(**fields: Any) -> dict[str, Any]:
    """Fields that only vLLM knows."""
    return {"extra_body": fields}


CASES: dict[str, dict[str, Any]] = {
    # What goes in.
    "text": {"messages": user("Count to five."), **GREEDY},
    "turns": {"messages": TURNS, **GREEDY},
    "image": {"messages": user(image(1), QUESTION), **GREEDY},
    "image_again": {"messages": user(image(1), QUESTION), **GREEDY},
    "image_after_text": {"messages": user(QUESTION, image(2)), **GREEDY},
    "two_images": {"messages": user(image(3), "and", image(4), "Describe each picture."), **GREEDY},
    "four_images": {"messages": user(*map(image, (5, 6, 7, 8)), "Describe each picture."), **GREEDY},
    "same_image_twice": {"messages": user(image(9), "and", image(9), "Describe each picture."), **GREEDY},
    "images_in_turns": {
        "messages": [
            *user(image(10), QUESTION),
            {"role": "assistant", "content": "a red circle"},
            *user(image(11), QUESTION),
        ],
        **GREEDY,
    },
    "video": {"messages": user(video(1), QUESTION), **GREEDY},
    "video_mp4": {"messages": user(film(7), QUESTION), **GREEDY},
    "video_and_image": {"messages": user(video(2), image(12), QUESTION), **GREEDY},
    "image_named": {"messages": user({**image(13), "uuid": "a-picture"}, QUESTION), **GREEDY},
    "image_smaller": {
        "messages": user(image(14), QUESTION),
        **GREEDY,
        **_extra(mm_processor_kwargs={"size": {"shortest_edge": 784, "longest_edge": 3136}}),
    },
    "image_min_max_pixels": {
        "messages": user(image(14), QUESTION),
        **GREEDY,
        **_extra(mm_processor_kwargs={"min_pixels": 784, "max_pixels": 6272}),
    },
    "media_io_kwargs": {
        "messages": user(video(3, frames=8), QUESTION),
        **GREEDY,
        **_extra(media_io_kwargs={"video": {"num_frames": 4}}),
    },
    "salted": {"messages": user(image(15), QUESTION), **GREEDY, **_extra(cache_salt="tenant")},
    "template": {
        "messages": user("Count to five."),
        **GREEDY,
        **_extra(chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}"),
    },
    "continued": {
        "messages": [*user("Count to five."), {"role": "assistant", "content": "one two"}],
        **GREEDY,
        **_extra(continue_final_message=True, add_generation_prompt=False),
    },
    "truncated": {"messages": user(LONG), **GREEDY, **_extra(truncate_prompt_tokens=64)},
    # How it ends.
    "default_limit": {"messages": user("Name the colours."), "temperature": 0},
    "to_the_end_of_the_context": {"messages": user(LONG, LONG), "temperature": 0, **_extra(ignore_eos=True)},
    "one_token": {"messages": user(image(16), QUESTION), "temperature": 0, "max_tokens": 1},
    "completion_limit": {"messages": user("Name the colours."), "temperature": 0, "max_completion_tokens": 3},
    "min_tokens": {"messages": user("Say hello."), **GREEDY, **_extra(min_tokens=20)},
    "stop": {"messages": user("Count to five."), **GREEDY, "stop": ["three"]},
    "stop_within_a_token": {"messages": user("Count to five."), **GREEDY, "stop": ["hre", "zz"]},
    "stop_included": {
        "messages": user("Count to five."),
        **GREEDY,
        "stop": ["three"],
        **_extra(include_stop_str_in_output=True),
    },
    "stop_image": {"messages": user(image(17), QUESTION), **GREEDY, "stop": [" of", " red"]},
    "special_tokens": {
        "messages": user("Count to five."),
        **GREEDY,
        **_extra(skip_special_tokens=False, include_stop_str_in_output=True),
    },
    # What is told beside the text.
    "logprobs": {"messages": user("Count to five."), **GREEDY, "logprobs": True, "top_logprobs": 3},
    "logprobs_without_top": {"messages": user("Count to five."), **GREEDY, "logprobs": True},
    "logprobs_image": {"messages": user(image(18), QUESTION), **GREEDY, "logprobs": True, "top_logprobs": 2},
    "logprobs_of_ids": {
        "messages": user("Count to five."),
        **GREEDY,
        "logprobs": True,
        **_extra(logprob_token_ids=[100, 200, 300]),
    },
    "logprobs_token_names": {
        "messages": user("Count to five."),
        **GREEDY,
        "logprobs": True,
        **_extra(return_tokens_as_token_ids=True),
    },
    "token_ids": {"messages": user(image(19), QUESTION), **GREEDY, **_extra(return_token_ids=True)},
    # How tokens are chosen.
    "seed": {"messages": user(image(20), QUESTION), **SAMPLED},
    "seed_again": {"messages": user(image(20), QUESTION), **SAMPLED},
    "several": {"messages": user("Who are you?"), **SAMPLED, "n": 3},
    "several_image": {"messages": user(image(21), QUESTION), **SAMPLED, "n": 2, "logprobs": True, "top_logprobs": 1},
    "top_k_p": {"messages": user("Who are you?"), **SAMPLED, "top_p": 0.9, **_extra(top_k=20, min_p=0.01)},
    "penalties": {
        "messages": user(image(22), QUESTION),
        **GREEDY,
        "frequency_penalty": 0.7,
        "presence_penalty": 0.5,
        **_extra(repetition_penalty=1.2),
    },
    "logit_bias": {"messages": user("Count to five."), **GREEDY, "logit_bias": {"300": 100.0}},
    "bad_words": {"messages": user("Count to five."), **GREEDY, **_extra(bad_words=["three", " three"])},
    "allowed_tokens": {"messages": user("Count to five."), **GREEDY, **_extra(allowed_token_ids=[300, 301, 302])},
    # Structure.
    "json_schema": {
        "messages": user("Describe the image."),
        **GREEDY,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}},
    },
    "json_schema_image": {
        "messages": user(image(23), QUESTION),
        **GREEDY,
        "max_tokens": 60,
        "response_format": {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}},
    },
    "json_object": {"messages": user("Count to five."), **GREEDY, "response_format": {"type": "json_object"}},
    "regex": {"messages": user(image(24), QUESTION), **GREEDY, **_extra(structured_outputs={"regex": "(ab){2,3}c"})},
    "choice": {
        "messages": user(image(25), QUESTION),
        **GREEDY,
        **_extra(structured_outputs={"choice": ["a red circle", "a blue square"]}),
    },
    "grammar": {
        "messages": user("Count to five."),
        **GREEDY,
        **_extra(structured_outputs={"grammar": 'root ::= "one" " two"? " three"'}),
    },
    "sampled_choice": {
        "messages": user("Who are you?"),
        **SAMPLED,
        "n": 3,
        **_extra(structured_outputs={"choice": ["red", "green", "blue"]}),
    },
    # Tools.
    "tool_auto": {"messages": user("Count to five."), **GREEDY, "tools": [TOOL], "tool_choice": "auto"},
    "tool_none": {"messages": user("Count to five."), **GREEDY, "tools": [TOOL], "tool_choice": "none"},
    "tool_required": {
        "messages": user("Count to five."),
        **GREEDY,
        "max_tokens": 80,
        "tools": [TOOL, OTHER_TOOL],
        "tool_choice": "required",
    },
    "tool_named": {
        "messages": user(image(26), QUESTION),
        **GREEDY,
        "max_tokens": 60,
        "tools": [TOOL, OTHER_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "wash"}},
    },
    "tool_result": {
        "messages": [
            *user("Count to five."),
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "paint", "arguments": '{"colour": "red"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ],
        **GREEDY,
        "tools": [TOOL],
    },
    "beam_search": {"messages": user("Who are you?"), "max_tokens": 6, "n": 2, **_extra(use_beam_search=True)},
}

WHOLE_ONLY: dict[str, dict[str, Any]] = {
    "echo": {
        "messages": [*user("Count to five."), {"role": "assistant", "content": "one two"}],
        **GREEDY,
        **_extra(continue_final_message=True, add_generation_prompt=False, echo=True),
    },
    "prompt_logprobs": {"messages": user("Count to five."), **GREEDY, **_extra(prompt_logprobs=2)},
    "prompt_logprobs_image": {"messages": user(image(30), QUESTION), **GREEDY, **_extra(prompt_logprobs=1)},
    "prompt_logprobs_two_images": {
        "messages": user(image(31), "and", image(32), "Describe each picture."),
        **GREEDY,
        "logprobs": True,
        **_extra(prompt_logprobs=0),
    },
}
"""vLLM refuses prompt_logprobs on streams, and fails there to echo."""

CACHE_COUNTS = frozenset({"cached_tokens", "created_cache_tokens"})
"""Of several answers to one prompt vLLM tells the counts of whichever ended last, the pipeline those of the first."""
