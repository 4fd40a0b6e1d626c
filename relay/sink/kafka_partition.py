"""Which partition librdkafka will choose for a key. Pure; needed only for the first events of a session.

A broker that knows nothing of a producer takes whatever sequence number comes first on a partition. So when it refuses
the first message set there, the next one, already on the wire, becomes durable before the events of the first
(reproduced; neither the gapless guarantee nor `max.in.flight = 1` prevents it). Once one event was acknowledged the
broker knows the sequence and refuses what follows a gap. Hence the first event to each partition travels alone.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable

Hash = Callable[[bytes], int]


@functools.lru_cache(maxsize=1 << 14)
def murmur2(key: bytes) -> int:
    """As `org.apache.kafka.common.utils.Utils.murmur2`, without the sign."""
    m = 0x5BD1E995
    h = 0x9747B28C ^ len(key)
    whole = len(key) & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(key[at : at + 4], "little") * m & 0xFFFFFFFF
        k = (k ^ k >> 24) * m & 0xFFFFFFFF
        h = (h * m & 0xFFFFFFFF) ^ k
    if whole < len(key):
        h = (h ^ int.from_bytes(key[whole:], "little")) * m & 0xFFFFFFFF
    h = (h ^ h >> 13) * m & 0xFFFFFFFF
    return (h ^ h >> 15) & 0x7FFFFFFF


@functools.lru_cache(maxsize=1 << 14)
def fnv1a(key: bytes) -> int:
    """As librdkafka and Sarama: the absolute value of the signed 32-bit hash."""
    h = 0x811C9DC5
    for byte in key:
        h = (h ^ byte) * 0x01000193 & 0xFFFFFFFF
    return h if h < 0x80000000 else 0x100000000 - h


# librdkafka's partitioners, but `random`, which the relay refuses
HASHES: dict[str, Hash] = {
    "murmur2": murmur2,
    "murmur2_random": murmur2,
    "consistent": zlib.crc32,
    "consistent_random": zlib.crc32,
    "fnv1a": fnv1a,
    "fnv1a_random": fnv1a,
}
