"""LSN: a position in the write-ahead log, as an integer that prints the way Postgres prints it.

LSNs are always compared as integers, never as text: PostgreSQL 19 pads the low half (`%X/%08X`), earlier ones do not,
and unpadded text sorts wrongly around every 4 GB of WAL.
"""

from __future__ import annotations


class LSN(int):
    """A 64-bit WAL position; `NOWHERE` means "none yet"."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> LSN:
        """Read `16/B374D848`; raises ValueError for anything else."""
        high, slash, low = text.partition("/")
        if not slash or not 1 <= len(high) <= 8 or not 1 <= len(low) <= 8:
            raise ValueError(f"not an LSN: {text!r} (expected hexadecimal like 16/B374D848)")
        try:
            # int() would also take "+1", " 1" and "1_0"; a hex round trip through bytes.fromhex is stricter.
            return cls(
                int.from_bytes(bytes.fromhex(high.zfill(8)), "big") << 32
                | int.from_bytes(bytes.fromhex(low.zfill(8)), "big")
            )
        except ValueError:
            raise ValueError(f"not an LSN: {text!r} (expected hexadecimal like 16/B374D848)") from None

    def __str__(self) -> str:
        return f"{self >> 32:X}/{self & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"LSN({self})"


NOWHERE = LSN(0)
