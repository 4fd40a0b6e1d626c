"""`python -m relay.embedded` fetches what would otherwise be fetched at the first start, Kafka's jars, and makes starts quick."""

from __future__ import annotations

import sys

from relay.embedded.kafka import archive_classes
from relay.embedded.process import EmbeddedError

if __name__ == "__main__":
    try:
        archive_classes()
    except EmbeddedError as error:
        sys.exit(f"{error}\n{error.hint}")
