"""What processes cost, read from outside: CPU of all their threads, peak memory, bytes written. Linux only.

And what was taken from all of them: on a virtual machine a core is not always there.
"""

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


class Stolen:
    """The share of all cores' time that the hypervisor gave to other machines, from its making on."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float:
        spent = [after - before for before, after in zip(self._before, psutil.cpu_times(), strict=True)]
        named = dict(zip(self._before._fields, spent, strict=True))
        total = sum(spent) - named.get("guest", 0.0) - named.get("guest_nice", 0.0)  # they are in user and nice, too
        return round(max(named.get("steal", 0.0), 0.0) / total, 4) if total > 0 else 0.0


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
