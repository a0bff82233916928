"""The training loop of the built-in checkpoints. The result depends on the schedule only."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from models import architectures, lessons, tokenizers
from models.architectures import ARCHITECTURES
from models.batches import Batcher, Tensors


@dataclass(frozen=True)
class Schedule:
    """How long and how hard to train."""

    steps: int = 4000
    batch: int = 32
    peak_rate: float = 2e-3
    seed: int = 0
    threads: int = 1


def train(name: str, out: Path, schedule: Schedule) -> None:
    """Train `name` and write its checkpoint to `out`."""
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
    for step, loss, exact in _learn(model, batcher, schedule):
        print(f"step {step:5d} loss {loss:.4f} exact {exact:.3f} minutes {_minutes():.1f}", flush=True)
        architectures.save(model, architecture, out)


def _learn(model: PreTrainedModel, batcher: Batcher, schedule: Schedule) -> Iterator[tuple[int, float, float]]:
    """Optimise, and report step, loss and share of exact answers every 100 steps and at the end."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=schedule.peak_rate, weight_decay=0.01, betas=(0.9, 0.98))
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, schedule.peak_rate, schedule.steps, pct_start=0.1)
    model.train()
    exact = 0.0
    for step in range(1, schedule.steps + 1):
        batch = batcher.draw(schedule.batch)
        output: Any = model(**batch)
        output.loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        exact += 0.05 * (_exact_share(output.logits, batch) - exact)
        if step % 100 == 0 or step == schedule.steps:
            yield step, output.loss.item(), exact


def _exact_share(logits: torch.Tensor, batch: Tensors) -> float:
    """Share of the batch whose every answer token is the most likely one."""
    labels = batch["labels"][:, 1:]
    right = (logits.argmax(-1)[:, :-1] == labels) | (labels == -100)
    return right.all(dim=1).float().mean().item()


def _minutes() -> float:
    return time.process_time() / 60
