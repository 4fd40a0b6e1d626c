"""Starts relays by fork, in a process that has imported everything: hundreds of starts cost seconds, not minutes.

What runs is the same as `python -m relay …`, in a process of its own. The zygote has no threads, no event loop and no
connections. `Zygote.start` sends it the arguments, and stdout, stderr and a pipe for the status; on the pipe come the
process id, and, when it has ended, what `os.waitpid` said. A plain `python -m relay run` also has its configuration
checked in a process of its own: that it starts is what the tests of demo, bench, chaos and packaging show.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO

_NUMBER = struct.Struct("<i")


class Forked:
    """A process that the zygote started; as much of Popen as we need."""

    def __init__(self, status: int, stdout: IO[str], stderr: IO[str]) -> None:
        self.stdout, self.stderr = stdout, stderr
        self._status = status
        self.pid: int = _NUMBER.unpack(os.read(status, 4))[0]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self.returncode if self._ready(0.0) else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ready(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, what: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, what)

    def _ready(self, timeout: float | None) -> bool:
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            said = os.read(self._status, 4)
            self.returncode = os.waitstatus_to_exitcode(_NUMBER.unpack(said)[0]) if said else -signal.SIGKILL
            os.close(self._status)
        return self.returncode is not None


class Zygote:
    """One per test process; it ends when we end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RELAY_", "PG"))}
        path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env={**environment, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._socket = ours
        atexit.register(self.close)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(30)

    def start(self, *arguments: str) -> Forked:
        """`python -m relay <arguments>`, with pipes for what it says."""
        out, err, status = os.pipe(), os.pipe(), os.pipe()
        try:
            socket.send_fds(self._socket, [json.dumps(arguments).encode()], [out[1], err[1], status[1]])
        finally:
            for pipe in (out, err, status):
                os.close(pipe[1])
        return Forked(status[0], os.fdopen(out[0]), os.fdopen(err[0]))

    def run(self, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """As subprocess.run does: wait for its end; what it said must fit into the pipes."""
        started = self.start(*arguments)
        with started.stdout, started.stderr:
            code = started.wait(timeout)
            return subprocess.CompletedProcess(list(arguments), code, started.stdout.read(), started.stderr.read())


@functools.cache
def zygote() -> Zygote:
    return Zygote()


# --- the other side


def _serve(asked: socket.socket) -> None:
    import relay.app
    import relay.cli
    import relay.sink.jetstream
    import relay.sink.kafka
    import relay.sink.kafka_exactly_once  # noqa: F401

    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests; they end us by closing the socket
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([asked.fileno(), wake], [], [])
        if wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake, 4096)
            _reap(children)
        if asked.fileno() in ready:
            data, numbers, _, _ = socket.recv_fds(asked, 1 << 16, 3)
            if not data:
                return
            out, err, status = numbers
            pid = os.fork()
            if pid == 0:
                asked.close()
                _become(json.loads(data), out, err, [wake, woken, status, *children.values()])
            os.close(out)
            os.close(err)
            os.write(status, _NUMBER.pack(pid))
            children[pid] = status


def _reap(children: dict[int, int]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, said = ended
            with contextlib.suppress(BrokenPipeError):
                os.write(children[pid], _NUMBER.pack(said))
            os.close(children.pop(pid))


def _become(arguments: list[str], out: int, err: int, foreign: list[int]) -> None:
    """A relay, until it ends."""
    from relay.__main__ import main

    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(out, 1)
        os.dup2(err, 2)
        for number in (out, err, *foreign):
            os.close(number)
        sys.argv = ["relay", *arguments]
        main()
        code = 0
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:  # noqa: BLE001  as the interpreter does
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
