"""What processes cost, read from outside: CPU of all their threads, peak memory, bytes written. Linux only."""

from __future__ import annotations

from pathlib import Path

import psutil


def cpu(pid: int) -> float:
    """User and system seconds of all threads of one process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def tree_cpu(pid: int) -> float:
    """The same for a process, its children, and the children that ended meanwhile."""
    server = psutil.Process(pid)
    times = server.cpu_times()
    total = times.user + times.system + times.children_user + times.children_system
    for child in server.children(recursive=True):
        try:
            total += cpu(child.pid)
        except psutil.NoSuchProcess:  # ended just now: the next reading finds it with its parent
            continue
    return float(total)


def peak_rss(pid: int) -> int:
    """The most memory that was ever resident, in bytes; the kernel keeps count, so nothing is missed in between."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def written(pid: int) -> int:
    """Bytes handed to write(2); what goes to a socket by send(2) does not count."""
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("wchar:"):
            return int(line.split()[1])
    return 0
