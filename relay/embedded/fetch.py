"""Downloads that are kept in the user's cache folder: fetched aside, then moved into place whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from relay.embedded.process import EmbeddedError

CONTENT = "content"  # what becomes the folder


@contextlib.contextmanager
def fetching(folder: Path, what: str) -> Iterator[Path]:
    """A scratch folder; what the caller puts into its subfolder `content` becomes `folder`."""
    print(f"→ {what} into {folder}", file=sys.stderr)  # noqa: T201 - a download is announced
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}.", dir=folder.parent) as partial:
        yield Path(partial)
        try:
            os.replace(Path(partial) / CONTENT, folder)  # noqa: PTH105 - fails, rather than nests, when it exists
        except OSError:
            if not folder.exists():  # else somebody else was faster, with the same content
                raise


def maven(cwd: Path, what: str, *arguments: str) -> None:
    """Run Maven. It checks checksums; with `-C` a missing or wrong one is an error."""
    run([tool("mvn", "apt-get install maven"), "-q", "-B", *arguments], cwd, f"Maven could not fetch {what}")


def run(command: list[str], cwd: Path, failure: str) -> None:
    """Run a command that fetches something; what it says is shown only when it fails."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise EmbeddedError(failure, hint=(done.stdout or done.stderr).strip()[-2000:])


def tool(name: str, install: str) -> str:
    """The program's path; raises with the way to install it."""
    found = shutil.which(name)
    if found is None:
        raise EmbeddedError(f"{name} is not installed", hint=install)
    return found
