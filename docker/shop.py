"""The demonstration's application: places orders, each together with its event in one transaction, at a steady rate.

Some transactions roll back on purpose; nobody may ever see their events. It needs nothing of the relay but the table.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import psycopg
from psycopg.types.json import Jsonb

_TABLE = """
CREATE TABLE IF NOT EXISTS orders (
    id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL,
    total    numeric(10, 2) NOT NULL
)
"""
_ORDER = "INSERT INTO orders (customer, total) VALUES (%s, %s) RETURNING id"
_EVENT = "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', %s, %s, %s)"
_CUSTOMERS = ("Ada", "Edsger", "Grace", "Barbara", "Leslie", "Donald", "Frances", "Tony")
_ROLLED_BACK = 0.05


def place(connection: psycopg.Connection[tuple[object, ...]]) -> None:
    customer, total = random.choice(_CUSTOMERS), round(random.uniform(5, 500), 2)
    with connection.transaction(force_rollback=random.random() < _ROLLED_BACK):
        row = connection.execute(_ORDER, (customer, total)).fetchone()
        assert row is not None
        order = str(row[0])
        for step in ("placed", "paid"):
            connection.execute(_EVENT, (order, step, Jsonb({"order": order, "customer": customer, "total": total})))


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    password = Path(os.environ["SHOP_PASSWORD_FILE"]).read_text().rstrip("\n")
    pause = 1 / float(os.environ.get("SHOP_RATE", "10"))
    with psycopg.connect(os.environ["SHOP_DSN"], password=password, autocommit=True) as connection:
        connection.execute(_TABLE)
        while True:
            place(connection)
            time.sleep(pause)


if __name__ == "__main__":
    main()
