"""Subjects, pure: which can be published to, and which stream's subjects cover which.

A topic comes from a row, so nothing here trusts it: what passes `fault` can neither break a protocol line nor reach the
server's own API.
"""

from __future__ import annotations

import re

# The server's limit for a protocol line is 4,096 bytes; the inbox, a token and two lengths share the line.
MAX_BYTES = 3_000
_UNPRINTABLE = re.compile(r"[\x00-\x20\x7f\x85\xa0\u2028\u2029]")
_RESERVED = ("$JS.", "$SYS.", "_INBOX.")


def fault(subject: str) -> str | None:
    """Why nothing can be published to this subject; None if it is fine."""
    if not subject:
        return "the subject is empty"
    if _UNPRINTABLE.search(subject):
        return f"the subject {subject[:200]!r} has a space or control character"
    tokens = subject.split(".")
    if "" in tokens:
        return f"the subject {subject[:200]!r} has an empty token"
    if "*" in tokens or ">" in tokens:
        return f"the subject {subject[:200]!r} has a wildcard"
    if subject.startswith(_RESERVED):
        return f"the subject {subject[:200]!r} is reserved for the server"
    try:
        size = len(subject.encode())
    except UnicodeEncodeError:
        return f"the subject {subject[:200]!r} is not Unicode text"
    if size > MAX_BYTES:
        return f"the subject has {size} bytes, more than {MAX_BYTES}"
    return None


def covers(pattern: str, subject: str) -> bool:
    """True if everything that `subject` (which may have wildcards itself) matches is matched by `pattern`."""
    theirs = subject.split(".")
    wanted = pattern.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(theirs) > index
        if index == len(theirs) or theirs[index] == ">":
            return False
        if part not in ("*", theirs[index]):
            return False
    return len(theirs) == len(wanted)
