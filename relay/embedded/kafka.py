"""A private Kafka: one KRaft node, broker and controller in one process, from jars that Maven fetches once.

The jars lie in the user's cache folder under a name that follows from the POM, so a new version never meets old jars.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import secrets
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from relay.config import cache_folder
from relay.embedded.fetch import CONTENT, fetching, maven, tool
from relay.embedded.process import EmbeddedError, Server, free_port

# Kafka's own POM names no logging backend, and without one the broker says nothing, not even why it ends.
_POM = """<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>relay</groupId>
  <artifactId>embedded-kafka</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>4.3.1</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-slf4j-impl</artifactId><version>2.24.3</version>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId><artifactId>log4j-core</artifactId><version>2.24.3</version>
    </dependency>
  </dependencies>
</project>
"""

_LOG4J = """rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c{1}: %m%n
"""

_JAVA = "apt-get install default-jre-headless (17 or newer)"

# What Kafka's own start script gives it; what other heaps did is in docs/benchmarks.md.
_JVM = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-XX:MaxGCPauseMillis=20", "-XX:InitiatingHeapOccupancyPercent=35")

# A stale archive is ignored; what the JVM says of that is nobody's concern.
_QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


class KafkaServer(Server):
    """One node; `properties` override the server's; `fast_start=False`: as it is run elsewhere (benchmarks)."""

    name = "kafka"

    def __init__(self, properties: Mapping[str, str] | None = None, *, fast_start: bool = True) -> None:
        self._java = tool("java", _JAVA)
        self._jars = jars()
        super().__init__()
        self.port = free_port()
        self.bootstrap = f"127.0.0.1:{self.port}"
        # Below 128: an id that begins with "-" would be taken for an option.
        number = bytes([secrets.randbelow(128)]) + secrets.token_bytes(15)
        self._cluster_id = base64.urlsafe_b64encode(number).decode().rstrip("=")
        self._fast_start = fast_start
        self._properties = (
            one_node(self.port, free_port()) | {"log.dirs": str(self.folder / "data")} | dict(properties or {})
        )

    def _prepare(self) -> None:
        config = self.folder / "server.properties"
        if config.exists():
            return
        config.write_text("".join(f"{name}={value}\n" for name, value in self._properties.items()))
        (self.folder / "log4j2.properties").write_text(_LOG4J)
        command = [*self._jvm(), "kafka.tools.StorageTool", "format", "-t", self._cluster_id, "-c", str(config)]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)  # noqa: S603
        if done.returncode:
            config.unlink()
            raise EmbeddedError("Kafka's storage could not be formatted", hint=(done.stderr or done.stdout).strip())

    def _jvm(self) -> list[str]:
        options = ("-Xms256m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1") if self._fast_start else _JVM
        if self._fast_start and (archive := _archive(self._java)).exists():
            options = (*options, f"-XX:SharedArchiveFile={archive}", *_QUIET)
        log = f"-Dlog4j2.configurationFile=file:{self.folder / 'log4j2.properties'}"
        return [self._java, *options, log, "-cp", f"{self._jars}/*"]

    def _command(self) -> list[str]:
        return [*self._jvm(), "kafka.Kafka", str(self.folder / "server.properties")]

    def _ready(self) -> bool:
        try:
            # A look at the port first: librdkafka would log every refused connection.
            socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
            return bool(AdminClient({"bootstrap.servers": self.bootstrap}).list_topics(timeout=2.0).brokers)
        except (OSError, KafkaException):
            return False


class _Archiving(KafkaServer):
    """It notes which classes it loaded, in the form in which they can be mapped into memory."""

    def _command(self) -> list[str]:
        java, *rest = super()._command()
        return [java, f"-XX:ArchiveClassesAtExit={self.folder / 'classes.jsa'}", *rest]


def one_node(port: int, controller_port: int) -> dict[str, str]:
    """Properties of a broker that is its own controller, on loopback."""
    return {
        "process.roles": "broker,controller",
        "node.id": "1",
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "inter.broker.listener.name": "PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "num.partitions": "4",
        # After kill() the controller admits the broker again only when its old session is over; the default is 9 s.
        "broker.session.timeout.ms": "3000",
        "broker.heartbeat.interval.ms": "500",
        # With the default of three replicas, groups and transactions never become available on one node.
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "1",
        "share.coordinator.state.topic.replication.factor": "1",
        "share.coordinator.state.topic.min.isr": "1",
        "group.initial.rebalance.delay.ms": "0",
        "auto.create.topics.enable": "false",
    }


@functools.cache
def jars() -> Path:
    """The folder with Kafka's jars; fetched by Maven when it is not there yet."""
    folder = cache_folder() / f"kafka-{hashlib.sha256(_POM.encode()).hexdigest()[:12]}"
    if folder.exists():
        return folder
    with fetching(folder, "Maven: Kafka's jars") as scratch:
        (scratch / "pom.xml").write_text(_POM)
        goal = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={CONTENT}")
        maven(scratch, "Kafka's jars", *goal)
    return folder


def archive_classes() -> None:
    """Start a broker and stop it, once for this Java: then each start takes two seconds of CPU less, of five."""
    archive = _archive(tool("java", _JAVA))
    if archive.exists():
        return
    with fetching(archive, "Kafka's classes, loaded once") as scratch, _Archiving() as server:
        server.stop()
        shutil.copyfile(server.folder / "classes.jsa", scratch / CONTENT)


def _archive(java: str) -> Path:
    """Where the classes are: of these jars, as this very Java has them."""
    real = Path(java).resolve()
    version = hashlib.sha256(f"{real} {real.stat().st_mtime_ns}".encode()).hexdigest()[:12]
    return jars().with_name(f"{jars().name}-{version}.jsa")
