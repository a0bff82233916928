"""Folders of engines' sockets, and what is left of them when their processes are killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from serving.socket_folder import SocketFolder

_HOLD = """
import sys
from pathlib import Path
from serving.socket_folder import SocketFolder

folder = SocketFolder(Path(sys.argv[1]))
(folder.path / "socket").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_goes_with_its_owner(tmp_path: Path) -> None:
    folder = SocketFolder(tmp_path)
    (folder.path / "socket").touch()
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_the_next_folder_removes_those_of_killed_processes_and_no_others(tmp_path: Path) -> None:
    others = [
        subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        dead, alive = (Path(other.stdout.readline().strip()) for other in others if other.stdout)
        others[0].kill()
        others[0].wait()
        assert dead.exists()
        folder = SocketFolder(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted([alive, folder.path])
        folder.close()
    finally:
        for other in others:
            other.kill()
            other.communicate()
    SocketFolder(tmp_path).close()
    assert list(tmp_path.iterdir()) == []
