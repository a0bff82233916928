"""All benchmarks, one after the other: `python -m benchmarks.run [--quick] [--json FILE]`.

Each runs in a process of its own. Their records are merged into one file.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from benchmarks.records import Record, options

NAMES = (
    "admission",
    "ec_engines",
    "ec_transfer",
    "ec_transport",
    "ec_soak",
    "first_token",
    "hostile",
    "idle",
    "pipeline",
    "serve",
)


def main() -> int:
    chosen = options(__doc__)
    records: list[Record] = []
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for name in NAMES:
            print(f"== {name}", flush=True)
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(file)]
            if subprocess.run(command + ["--quick"] * chosen.quick).returncode:
                failed.append(name)
                continue
            records += msgspec.json.decode(file.read_bytes(), type=list[Record])
    if chosen.json is not None:
        chosen.json.write_bytes(msgspec.json.format(msgspec.json.encode(records), indent=2))
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
