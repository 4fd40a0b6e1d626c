"""Checks the configuration in a process of its own, which ends: the library that does it takes 10 MB for good.

Meanwhile this one loads what it will run with. What comes back are the same sections, from the same code, without the
library (`relay/config/unchecked.py`). It must be used before anything has loaded `relay.config`, and before threads.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from relay import lean
from relay.errors import ConfigError, RelayError

if TYPE_CHECKING:
    from relay.config import Config


def load(path: Path | None) -> Config:
    """What `relay.config.load` would return or raise."""
    assert "relay.config" not in sys.modules
    reading, writing = os.pipe()
    try:
        child = os.fork()
    except OSError as exc:
        raise RelayError(f"no process can be started to check the configuration: {exc}") from None
    if child == 0:
        os.close(reading)
        _check(path, writing)
    os.close(writing)
    lean.checked_apart = True
    from relay import log, app  # noqa: F401, I001, PLC0415  takes as long as the check; the log knows what to leave out

    with os.fdopen(reading, "rb") as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    if how := os.waitstatus_to_exitcode(status):  # else the answer is whole
        raise RelayError(f"the configuration could not be checked: the process that does it ended with {how}")
    result: Config | ConfigError = pickle.loads(answer)  # noqa: S301  from ourselves
    if isinstance(result, ConfigError):
        raise result
    return result


def _check(path: Path | None, writing: int) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends in a moment; the other one answers Ctrl-C
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # … and then nobody listens: no reason to complain
        from relay import config  # noqa: PLC0415

        result: Config | ConfigError
        try:
            result = config.load(path)
        except ConfigError as exc:
            result = exc
        with os.fdopen(writing, "wb") as answers:
            _Pickler(answers).dump(result)
        code = 0
    except BaseException:  # noqa: BLE001
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


class _Pickler(pickle.Pickler):
    """Replaces what the other process cannot load."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)

    def reducer_override(self, value: Any) -> Any:
        from pydantic import SecretStr  # noqa: PLC0415

        from relay.config import unchecked  # noqa: PLC0415

        if isinstance(value, SecretStr):
            return unchecked.SecretStr, (value.get_secret_value(),)
        if isinstance(value, ConfigError):
            return _error, (value.faults, value.hint)
        return NotImplemented


def _error(faults: list[str], hint: str) -> ConfigError:
    return ConfigError(faults, hint=hint)
