"""The relay of the demo: `relay run` as a process of its own, so that it can be killed like one.

It is a private server like the others: its folder holds relay.toml and its log, and it never outlives the demo.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import IO

import relay
from relay.config import Config, load, plain_environment
from relay.embedded.process import EmbeddedError, Server, free_port

STREAM = "EVENTS"
TOPIC = "events.order"

_STOP_TIMEOUT = 5.0

# Loopback never goes through the proxy that the user's environment may name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))

# The relay that is killed is the one that the demo was imported from, installed or not.
_CODE = str(Path(relay.__file__).parent.parent)

_COMMON = """\
[relay]
name = "demo"

[database]
dsn = "{dsn}"

[delivery]
shutdown_timeout = "3s"

[admin]
listen = "127.0.0.1:{port}"

[log]
format = "text"
"""
_JETSTREAM = """
[sink.jetstream]
servers = ["{broker}"]

[[sink.jetstream.streams]]
name = "{stream}"
subjects = ["events.>"]
create = true
"""
# One topic for all steps of an order: Kafka keeps the order of a key within a topic only.
_KAFKA = """
[routing]
topic = "events.{{aggregate_type}}"

[sink]
kind = "kafka"

[sink.kafka]
create_topics = true
topics = ["{topic}"]

[sink.kafka.options]
"bootstrap.servers" = "{broker}"
"""


class RelayProcess(Server):
    """`start()` returns when it is ready; `kill()` is kill -9; `close()` lets it drain."""

    name = "relay"

    def __init__(self, dsn: str, broker: str, *, kafka: bool) -> None:
        super().__init__()
        port = free_port()
        self.admin_url = f"http://127.0.0.1:{port}"
        self._path = self.folder / "relay.toml"
        text = _COMMON + (_KAFKA if kafka else _JETSTREAM)
        self._path.write_text(text.format(dsn=dsn, port=port, broker=broker, stream=STREAM, topic=TOPIC))

    @property
    def config(self) -> Config:
        return load(self._path, {})

    def close(self) -> None:
        """Let it drain and confirm, as a service manager would; but nobody waits long for a demo."""
        if self.is_running:
            try:
                self.stop(_STOP_TIMEOUT)
            except EmbeddedError:
                self.kill()
        super().close()

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "relay", "run", "--config", str(self._path)]

    def _spawn(self, log: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603
            self._command(),
            cwd=self.folder,
            env=plain_environment() | {"PYTHONPATH": _CODE},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def _ready(self) -> bool:
        try:
            with _DIRECT.open(f"{self.admin_url}/readyz", timeout=2.0) as answer:
                # Ready already while it recovers; the demo is about what comes afterwards.
                return bool(json.load(answer)["state"] == "streaming")
        except OSError:  # also what urllib raises for 503
            return False
