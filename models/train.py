"""Train a built-in checkpoint from scratch: `python -m models.train NAME [--out DIR]`."""

import argparse
from pathlib import Path

from models import registry
from serving.plugin import register


def main() -> None:
    register()  # before anything imports transformers, whose Qwen-VL processors need torchvision
    from models.training import STEPS, Schedule, train

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=registry.NAMES)
    parser.add_argument("--out", type=Path, help="directory to write; the package's own checkpoint by default")
    parser.add_argument("--steps", type=int, help="as many as the package's checkpoint had, by default")
    parser.add_argument("--threads", type=int, default=Schedule.threads)
    arguments = parser.parse_args()
    out = arguments.out or registry.CHECKPOINTS / arguments.name
    out.mkdir(parents=True, exist_ok=True)
    steps = arguments.steps or STEPS[arguments.name]
    train(arguments.name, out, Schedule(steps=steps, threads=arguments.threads))


if __name__ == "__main__":
    main()
