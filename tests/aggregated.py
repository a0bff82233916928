"""One ordinary vLLM engine, run in a process of its own: what the pipeline's answers are compared with.

    python -m tests.aggregated MODEL < cases.json > answers.json

Each case is a list of prompts that run at the same time: `{"parts": [...], "cut": bool}`, where a part is text or
`{"image": base64 PNG}`, and `cut` ends the prompt with its last image; or `{"token_ids": [...]}`. The answer to a case
is the list of its prompts' `{"prompt_token_ids", "token_ids", "text", "finish_reason"}`. Prefix caching is on.
"""

from __future__ import annotations

import base64
import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

MAX_TOKENS = 24
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def answers(model: str, cases: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Run `cases` in order in a fresh engine of a fresh process, which is gone when this returns."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.aggregated", model],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=os.environ | ENVIRONMENT,
        timeout=600,
    )
    if done.returncode:
        raise RuntimeError(f"the aggregated engine failed:\n{done.stderr[-4000:]}")
    result: dict[str, list[dict[str, Any]]] = json.loads(done.stdout.rsplit("ANSWERS", 1)[1].splitlines()[0])
    return result


def main() -> None:
    from vllm import LLM, SamplingParams

    from models.registry import resolve

    cases = json.load(sys.stdin)
    llm = LLM(
        resolve(sys.argv[1]),
        max_model_len=1024,
        enforce_eager=True,
        distributed_executor_backend="uni",
        enable_prefix_caching=True,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        limit_mm_per_prompt={"image": 4},
    )
    sampling = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    result = {}
    for name, prompts in cases.items():
        outputs = llm.generate([_input(llm.get_tokenizer(), prompt) for prompt in prompts], sampling, use_tqdm=False)
        result[name] = [
            {
                "prompt_token_ids": output.prompt_token_ids,
                "token_ids": list(output.outputs[0].token_ids),
                "text": output.outputs[0].text,
                "finish_reason": output.outputs[0].finish_reason,
            }
            for output in outputs
        ]
    print("ANSWERS" + json.dumps(result))


def _input(tokenizer: Any, prompt: Mapping[str, Any]) -> dict[str, Any]:
    """The prompt as the chat template writes it, images not yet expanded."""
    from PIL import Image

    if "token_ids" in prompt:
        return {"prompt_token_ids": prompt["token_ids"]}
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in prompt["parts"]]
    images = [Image.open(io.BytesIO(base64.b64decode(p["image"]))) for p in prompt["parts"] if isinstance(p, dict)]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    if prompt["cut"]:
        placeholder = next(token for token in ("<|image_pad|>", "<image>") if token in text)
        text = text[: text.rindex(placeholder) + len(placeholder)]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return {"prompt_token_ids": token_ids} | ({"multi_modal_data": {"image": images}} if images else {})


if __name__ == "__main__":
    main()
