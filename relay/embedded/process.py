"""One private server process: its folder, its log, its signals, and its end.

A server runs in a session of its own, so that Ctrl-C in a terminal reaches the relay and not the server under it. It
must never outlive the Python process that started it: a small shell, the warden, waits on a pipe that the kernel
closes when we die, however we die; then it ends the server and removes the folder. (A parent-death signal would not
do: it fires when the *thread* that started the server ends.)
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import psutil

from relay.errors import OperatorError

# Below the range from which the kernel takes ports for outgoing connections: a server that is down for a restart must
# not lose its port to a client's socket.
_PORTS = range(15000, 32000)
_BLOCK = 100

# $1 pid, $2 signal, $3 folder to remove or "". A line on stdin means that the server was ended in the ordinary way.
_WARDEN = """
trap '' HUP INT TERM
read -r line && exit 0
kill -CONT "$1" && kill -"$2" "$1"
n=0
while kill -0 "$1" && [ $n -lt 50 ]; do sleep 0.1; n=$((n+1)); done
kill -KILL "$1"
[ -z "$3" ] || rm -rf -- "$3"
"""


class EmbeddedError(OperatorError):
    """A private server cannot be had, did not start or did not stop; the hint says what to install or to read."""


def _own_ports() -> Iterator[int]:
    """Ports in blocks that no other process of ours takes from, each port once: whoever has it may start later.

    A block is claimed by a name of the kernel's abstract sockets, which is free again when we have died, however.
    """
    for first in random.sample(_PORTS[::_BLOCK], len(_PORTS[::_BLOCK])):
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0relay-ports-{first}")
        except OSError:
            claim.close()
            continue
        claim.detach()  # open until we end
        yield from range(first, first + _BLOCK)


_ports = _own_ports()


def free_port() -> int:
    """A port on loopback that nobody listens on, nobody else will be given, and no outgoing connection either."""
    for port in _ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise EmbeddedError("no free port on 127.0.0.1", hint=f"looked between {_PORTS.start} and {_PORTS.stop}")


def wait_until(condition: Callable[[], bool], timeout: float, interval: float = 0.02) -> bool:
    """Ask until the answer is yes; False when the time is over."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True


def freeze(processes: Collection[psutil.Process], timeout: float = 30.0) -> None:
    """SIGSTOP, and wait until not one thread moves: the signal stops them one by one, and a busy machine lets it."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    if not wait_until(lambda: all(_is_frozen(process.pid) for process in processes), timeout, 0.001):
        raise EmbeddedError(f"not all of {[process.pid for process in processes]} stood still within {timeout:g} s")


def _is_frozen(pid: int) -> bool:
    """The first thread is asked first: when it stands still, the others can make no new ones."""
    tasks = Path(f"/proc/{pid}/task")
    return _stands_still(tasks / str(pid)) and all(map(_stands_still, tasks.glob("*")))


def _stands_still(task: Path) -> bool:
    try:
        return (task / "stat").read_bytes().rpartition(b") ")[2][:1] in b"TtZX"
    except OSError:  # it has ended
        return True


class Server:
    """Start, stop, kill, freeze. The folder (data, config, log) lives until `close()`; `with` starts and closes."""

    name = "server"
    stop_signal = signal.SIGTERM
    end_signal = signal.SIGKILL  # what the warden sends, and `close()`: the data is thrown away anyway
    start_timeout = 60.0
    end_timeout = 30.0

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=f"relay-{self.name}-"))
        self.log_path = self.folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._warden: subprocess.Popen[bytes] | None = None

    # --- what a kind of server says about itself

    def _prepare(self) -> None:
        """Write config and data before the first start."""

    def _command(self) -> list[str]:
        raise NotImplementedError

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        command = self._command()
        return subprocess.Popen(  # noqa: S603
            command, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )

    def _ready(self) -> bool:
        raise NotImplementedError

    # --- life

    def start(self) -> Self:
        """Start on the same ports and the same data as before, and return when the server answers."""
        if self._alive():
            return self
        self._prepare()
        with self.log_path.open("ab") as log:
            self._process = self._spawn(log)
        self._warden = _start_warden(self._process.pid, self.end_signal, self.folder)
        if not wait_until(lambda: not self._alive() or self._ready(), self.start_timeout):
            self.kill()
            raise EmbeddedError(f"{self.name} was not ready within {self.start_timeout:g} s", hint=self.log_tail())
        if not self._alive():
            self._reap(0)
            raise EmbeddedError(f"{self.name} ended while starting", hint=self.log_tail())
        return self

    def stop(self, timeout: float = 30.0) -> None:
        """Ask the server to end, and wait; its data stays for the next `start()`."""
        self._end(self.stop_signal, timeout)

    def kill(self) -> None:
        """SIGKILL to the server and all its children at once: a crash, not a shutdown."""
        with contextlib.suppress(EmbeddedError):
            freeze(self._tree()[:1])  # else a child that it forks at this moment lives on, and meets the next start
        tree = self._tree()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._reap(10.0)
        psutil.wait_procs(tree[1:], timeout=10.0)  # the next start must not meet them in the same data

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """End the server and remove its folder."""
        try:
            if self.is_running:
                self.thaw()
                self._end(self.end_signal, self.end_timeout)
        finally:
            self.kill()  # what did not end by itself must not outlive its folder
            shutil.rmtree(self.folder, ignore_errors=True)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open, and nothing answers from now on."""
        frozen: set[psutil.Process] = set()
        while moving := set(self._tree()) - frozen:  # as long as one of them moves, it may start others
            freeze(moving)
            frozen |= moving

    def thaw(self) -> None:
        for process in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    @property
    def is_running(self) -> bool:
        return self._alive()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise EmbeddedError(f"{self.name} is not running", hint="call start() first")
        return self._process.pid

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the server's log."""
        if not self.log_path.exists():
            return ""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-lines:])

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside

    def _alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _end(self, how: signal.Signals, timeout: float) -> None:
        if self._process is None:
            return
        if self.is_running:
            self._process.send_signal(how)
            try:
                self._process.wait(timeout)
            except subprocess.TimeoutExpired as error:
                hint = f"kill() ends it; its log says:\n{self.log_tail()}"
                raise EmbeddedError(f"{self.name} did not stop within {timeout:g} s", hint=hint) from error
        self._reap(0)

    def _reap(self, timeout: float) -> None:
        """Collect the ended process and send the warden home."""
        if self._process is not None:
            self._process.wait(timeout)
            self._process = None
        warden, self._warden = self._warden, None
        if warden is not None:
            with contextlib.suppress(BrokenPipeError):
                warden.communicate(b"ended\n", timeout=10.0)

    def _tree(self) -> list[psutil.Process]:
        if not self.is_running:
            return []
        try:
            server = psutil.Process(self.pid)
            return [server, *server.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _start_warden(pid: int, how: signal.Signals, folder: Path) -> subprocess.Popen[bytes]:
    shell = shutil.which("sh", path=os.defpath) or "sh"
    return subprocess.Popen(  # noqa: S603
        [shell, "-c", _WARDEN, "warden", str(pid), how.name.removeprefix("SIG"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
