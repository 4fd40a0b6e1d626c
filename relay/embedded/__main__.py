"""`python -m relay.embedded` does once what each start of Kafka needs: its jars are fetched, its classes archived."""

from __future__ import annotations

import sys

from relay.embedded.kafka import archive_classes
from relay.embedded.process import EmbeddedError

if __name__ == "__main__":
    try:
        archive_classes()
    except EmbeddedError as error:
        sys.exit(f"{error}\n{error.hint}")
