"""What the process tests look at and run: live processes, open files, shared memory, scripts of their own."""

import contextlib
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether `condition` becomes true within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie (which its parent, or init, has only to collect)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """All processes below `pid`: workers, and the resource tracker of multiprocessing."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # threads and processes come and go while we look
        for task in Path(f"/proc/{pid}/task").iterdir():
            children: list[str] = []
            with contextlib.suppress(OSError):
                children = (task / "children").read_text().split()
            for child in children:
                found += [int(child), *descendants(int(child))]
    return found


def workers_of(pid: int) -> list[int]:
    """The spawned ranks below `pid`."""
    return [child for child in descendants(pid) if "spawn_main" in command_line(child)]


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def num_open_files(pid: int | str = "self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """User and system time that the process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def shared_memory(pid: int | None = None) -> set[str]:
    """Names in /dev/shm, without those that other processes' engines have there: tests run side by side."""
    owners = {name: re.match(r"nanovllm-(\d+)-", name) for name in os.listdir("/dev/shm")}
    return {name for name, owner in owners.items() if owner is None or int(owner[1]) == (pid or os.getpid())}


def start_script(folder: Path, text: str, *args: str) -> subprocess.Popen:
    """Run `text` as a script of its own, in a process group of its own; output and errors are pipes."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    return subprocess.Popen(
        [sys.executable, str(script), *args],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def finish(script: subprocess.Popen, timeout: float = 60) -> tuple[int, str, str]:
    """(exit code, output, errors); a script that hangs is killed with its group and fails the test."""
    try:
        out, err = script.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(script.pid, 9)
        out, err = script.communicate()
        raise AssertionError(f"the script hangs; it wrote:\n{out}\n{err}") from None
    return script.returncode, out, err
