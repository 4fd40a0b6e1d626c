"""What processes cost, read from outside: CPU of all their threads, peak memory, bytes written. Linux only."""

from __future__ import annotations

from pathlib import Path

import psutil


def cpu(pid: int) -> float:
    """User and system seconds of all threads of one process."""
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def tree_cpu(pid: int) -> float:
    """The same for a server, its children, and the children that ended meanwhile.

    A child that ends moves its time to its parent. While that happens it would be counted twice or not at all, so a
    reading counts only if the same children, and the parent's account of the ended ones, stand at its end.
    """
    server = psutil.Process(pid)
    while True:
        children = server.children()
        ended = server.cpu_times()[2:4]
        try:
            total = sum(cpu(child.pid) for child in children)
        except psutil.NoSuchProcess:
            continue
        times = server.cpu_times()
        if times[2:4] == ended and server.children() == children:
            return float(total + sum(times[:4]))


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
