"""What users see of credentials: with the right ones events flow, with wrong ones one clear line; never a secret.

Every command that touches the servers is run as a process of its own, and all that it prints is searched.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.relays import RelayProcess
from tests.zygote import zygote


def command(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return zygote().run(*arguments, "--config", str(config))


def keeps_silent(text: str, secrets: Sequence[str]) -> None:
    assert "Traceback" not in text, text
    for secret in secrets:
        assert secret not in text, f"a secret shows: {text}"


async def refused(config: Path, says: str, secrets: Sequence[str] = ()) -> None:
    """`relay run` ends with exit code 3, one line and a hint, in the log and on stderr; `relay check` says the same."""
    with RelayProcess(config) as relay:
        code = await relay.ended()
    keeps_silent("".join([*relay.stdout, *relay.stderr]), secrets)
    assert code == 3, relay.output
    error, hint = (line for line in relay.stderr if line.startswith(("error: ", "hint: ")))
    assert error.startswith("error: ") and says in error and hint.startswith("hint: "), relay.output
    (failed,) = relay.said("relay.failed")
    assert failed["level"] == "error" and failed["error_class"] == "AuthError", failed
    assert says in failed["error"] and failed["hint"], failed
    checked = command(config, "check", "--json")
    keeps_silent(checked.stdout + checked.stderr, secrets)
    assert checked.returncode == 3, checked
    assert any(says in finding["message"] for finding in json.loads(checked.stdout)), checked


async def accepted(config: Path, secrets: Sequence[str] = ()) -> None:
    """The relay streams, and nothing that it says or shows holds a secret."""
    checked = command(config, "check")
    assert checked.returncode == 0, checked
    said = [checked.stdout, checked.stderr]
    with RelayProcess(config) as relay:
        await relay.streaming()
        await relay.says("sink.opened")
        said += [json.dumps(relay.http(path)[1]) for path in ("/status", "/readyz", "/metrics")]
        await relay.stopped()
    said += [*relay.stdout, *relay.stderr]
    for arguments in (("check", "--show-config"), ("status", "--json")):
        done = command(config, *arguments)
        assert done.returncode == 0, done
        said += [done.stdout, done.stderr]
    keeps_silent("\n".join(said), secrets)
