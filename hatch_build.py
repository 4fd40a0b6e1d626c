"""Builds the C parts (relay/_*.c) where there is a C compiler; elsewhere the package is pure Python, and slower."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Hook(BuildHookInterface):  # type: ignore[type-arg,misc]
    """Runs before a wheel, or an editable install, is made."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002  the interface's
        names = (*shlex.split(sysconfig.get_config_var("CC") or "")[:1], "cc", "gcc")
        compiler = next(filter(None, map(shutil.which, names)), "cc")
        includes = {sysconfig.get_path(name) for name in ("include", "platinclude")}
        flags = ["-O2", "-fPIC", "-shared", "-Wall", "-pthread", *(f"-I{path}" for path in sorted(includes))]
        for source in sorted((Path(self.root) / "relay").glob("_*.c")):
            built = source.with_name(f"{source.stem}{sysconfig.get_config_var('EXT_SUFFIX')}")
            built.unlink(missing_ok=True)  # the one of another source, if this one cannot be built
            try:
                command = [compiler, *flags, str(source), "-o", str(built), "-ldl"]
                subprocess.run(command, check=True, capture_output=True)  # noqa: S603
            except (OSError, subprocess.CalledProcessError) as exc:
                why = (getattr(exc, "stderr", b"") or str(exc).encode()).decode().strip()[:300]
                self.app.display_warning(f"without {source.name} (slower, the same otherwise): {why}")
                continue
            build_data["artifacts"].append(f"/relay/{built.name}")
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
