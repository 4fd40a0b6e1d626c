"""Secrets: read from their files, and masked wherever a configuration is shown."""

from __future__ import annotations

import re
from pathlib import Path

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from relay.errors import ConfigError

SECRET_OPTION = re.compile(r"password|secret|oauthbearer\.config|key\.pem|keystore\.pem|jaas|token$|passphrase")


def read_secret(path: Path) -> str:
    """The content of a secret's file, without the newline that editors add."""
    try:
        return path.read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "it is not text in UTF-8"
        raise ConfigError(
            [f"{path}: cannot read the secret: {reason}"],
            hint="correct the path, or let the user who runs the relay read the file",
        ) from None


def mask_dsn(dsn: str) -> str:
    """The DSN as key=value pairs, with secrets masked."""
    parts = conninfo_to_dict(dsn)
    return make_conninfo("", **{k: "********" if re.search("password|secret", k) else v for k, v in parts.items()})


def mask_url(url: str) -> str:
    """Everything up to the last @ is masked: a password may itself hold what should have been escaped."""
    return re.sub(r"^([a-z]+://)?.*@", r"\1********@", url)


def unreadable(exc: ProgrammingError) -> str:
    # libpq quotes what it could not read, and that may be a piece of the password.
    reason = re.sub(r'".*"', '"…"', str(exc).strip(), flags=re.DOTALL)
    return f"not a connection string: {reason}"
