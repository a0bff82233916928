"""The training loop of the built-in checkpoints. The result depends on the schedule only."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from models import architectures, lessons, tokenizers
from models.architectures import ARCHITECTURES
from models.batches import IGNORED, Batch, Batcher

_REPORT_EVERY: Final = 200


@dataclass(frozen=True)
class Schedule:
    """How long and how hard to train. `plain_share` of the steps see single pictures and bare questions."""

    steps: int
    lessons_per_step: int = 16
    peak_rate: float = 1.5e-3
    plain_share: float = 0.3
    seed: int = 0
    threads: int = 1


STEPS: Final[Mapping[str, int]] = {"tiny-qwen2-vl": 3000, "tiny-qwen3-vl": 3000, "tiny-llava": 2500}
"""Steps that the checkpoints of this package were trained for."""


class Progress:
    """Running share, by kind of lesson, of answers whose every token is the most likely one."""

    def __init__(self) -> None:
        self._share: dict[str, float] = defaultdict(float)

    def note(self, kind: str, exact: bool) -> None:
        self._share[kind] += 0.01 * (exact - self._share[kind])

    def __str__(self) -> str:
        return " ".join(f"{kind} {share:.3f}" for kind, share in sorted(self._share.items()))


def train(name: str, out: Path, schedule: Schedule) -> None:
    """Train `name` and write its checkpoint to `out`.

    Every report writes it anew and rounds the live weights to bfloat16, so that they get used to it.
    """
    started = time.monotonic()
    torch.set_num_threads(schedule.threads)
    torch.manual_seed(schedule.seed)
    architecture = ARCHITECTURES[name]
    make_tokenizer = {"qwen": tokenizers.qwen, "llava": tokenizers.llava}[architecture.family]
    tokenizer = make_tokenizer(lessons.corpus())
    tokenizer.save_pretrained(out)
    model = architecture.build(tokenizer)
    architectures.save(model, architecture, out)
    batcher = Batcher(out, architecture.family, tokenizer, schedule.seed)
    print(f"{name}: {sum(weight.numel() for weight in model.parameters()):,} parameters", flush=True)
    for step, loss, progress in _learn(model, batcher, schedule):
        minutes = (time.monotonic() - started) / 60
        print(f"step {step} loss {loss:.4f} exact: {progress} minutes {minutes:.1f}", flush=True)
        architectures.save(model, architecture, out)


def _learn(model: PreTrainedModel, batcher: Batcher, schedule: Schedule) -> Iterator[tuple[int, float, Progress]]:
    """Optimise; report step, loss and progress now and then and at the end."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=schedule.peak_rate, weight_decay=0.01, betas=(0.9, 0.99))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.peak_rate, schedule.steps, pct_start=0.05)
    model.train()
    progress = Progress()
    for step, batch in enumerate(_batches(batcher, schedule), start=1):
        loss = _backward(model, batch, progress)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        if step % _REPORT_EVERY == 0 or step == schedule.steps:
            yield step, loss, progress


def _batches(batcher: Batcher, schedule: Schedule) -> Iterator[Batch]:
    """One batch for each step."""
    waiting: list[Batch] = []
    for step in range(schedule.steps):
        if not waiting:
            plain = step < schedule.plain_share * schedule.steps
            waiting = batcher.draw(schedule.lessons_per_step, plain=plain)
        yield waiting.pop()


def _backward(model: Any, batch: Batch, progress: Progress) -> float:
    """Add one batch's gradients; only the places with a label go through the output layer."""
    positions = {}
    if batch.rope_grid_thw is not None:
        ids, types = batch.inputs["input_ids"], batch.inputs["mm_token_type_ids"]
        positions["position_ids"], _ = model.model.get_rope_index(ids, types, image_grid_thw=batch.rope_grid_thw)
    hidden = model.model(**batch.inputs, **positions, use_cache=False).last_hidden_state
    taught = batch.labels != IGNORED
    targets = batch.labels[taught]
    logits = model.lm_head(hidden[taught])
    loss = torch.nn.functional.cross_entropy(logits, targets)
    loss.backward()
    right = torch.ones_like(taught).masked_scatter(taught, logits.argmax(-1) == targets)
    for kind, exact in zip(batch.kinds, right.all(dim=1).tolist(), strict=True):
        progress.note(kind, exact)
    return float(loss.item())
