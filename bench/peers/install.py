"""Debezium Server's distribution, as its project publishes it, from Maven into the cache folder; 420 MB once unpacked.

Only what its own start script puts on the class path is kept.
"""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

from bench.peers import java
from relay.config import cache_folder
from relay.embedded.fetch import CONTENT, fetching, maven
from relay.embedded.process import EmbeddedError

VERSION = "3.6.0.Final"
_SHA256 = "901ce7b0b75b4dafaac4aa57dac6dfcad5937f96fb7159e25d22759bbf5192e4"
_ARTIFACT = f"io.debezium:debezium-server-dist:{VERSION}:tar.gz"
# Later ones also ask for the artifact's parent POM, which not every repository has.
_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:2.8:copy"


def folder() -> Path:
    """Where it is, or would be."""
    return cache_folder() / f"debezium-server-{VERSION}-{_SHA256[:12]}"


def class_path() -> str:
    """As in its `run.sh`."""
    return f"{folder()}/debezium-server-dist-{VERSION}-runner.jar:{folder()}/lib/*"


def missing() -> str:
    """What has to be installed before Debezium Server can be measured; "" if nothing."""
    lacking = [] if java.find() else [f"Java {java.OLDEST} or newer"]
    if not folder().exists():
        lacking.append(f"Debezium Server {VERSION}")
    return " and ".join(lacking)


def install() -> None:
    """Fetch what is missing."""
    java.install()
    if folder().exists():
        return
    with fetching(folder(), f"Maven: Debezium Server {VERSION} (780 MB to load)") as scratch:
        # Its own repository: 780 MB that nobody needs again would stay in the user's.
        own = f"-Dmaven.repo.local={scratch / 'repository'}"
        maven(scratch, "Debezium Server", "-C", _PLUGIN, f"-Dartifact={_ARTIFACT}", "-DoutputDirectory=.", own)
        _unpack(scratch / f"debezium-server-dist-{VERSION}.tar.gz", scratch / CONTENT)


def _unpack(archive: Path, target: Path) -> None:
    with archive.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != _SHA256:
            raise EmbeddedError(f"{archive.name} is not what it was", hint=f"its SHA-256 should be {_SHA256}")
    with tarfile.open(archive) as tar:
        for member in tar:
            name = member.name.removeprefix("debezium-server/")
            if member.isfile() and (name.endswith("-runner.jar") or name.startswith("lib/")):
                tar.extract(member.replace(name=name), target, filter="data")
