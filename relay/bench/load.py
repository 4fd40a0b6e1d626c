"""The rows, made by Postgres itself: a client that made them would cost memory and CPU that the measurement sees."""

from __future__ import annotations

from relay.bench.plan import PAYLOAD_BYTES

# "t" is when the row was written, for latencies; "item" numbers the rows of a round, so that a reader can tell which
# came twice or never, whatever else a tool puts around them. Fixed widths: every payload has the same size.
_LINES = '[{"sku": "A-100", "count": 2}, {"sku": "B-7", "count": 1}]'
_HEAD = f'{{"t": %s, "item": "%s", "state": "created", "lines": {_LINES}, "note": "'
_NOTE = "x" * (PAYLOAD_BYTES - len(_HEAD) - len('"}') + len("%s%s") - 16 - 9)
FUNCTIONS = f"""
CREATE SEQUENCE bench_item;
CREATE TABLE bench_neighbour (n bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text NOT NULL);
CREATE FUNCTION bench_payload(n bigint) RETURNS jsonb LANGUAGE sql VOLATILE AS $$
    SELECT format('{_HEAD}{_NOTE}"}}', (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
                  lpad(n::text, 9, '0'))::jsonb
$$;
-- Other tables write `neighbours` of all WAL: so many rows go into one after each transaction.
CREATE PROCEDURE bench_load(total bigint, per_transaction bigint, keys bigint, neighbours numeric)
LANGUAGE plpgsql AS $$
DECLARE
    base bigint := nextval('bench_item');
    mark pg_lsn;
    owed numeric := 0;
BEGIN
    PERFORM setval('bench_item', base + total - 1);
    FOR start_at IN 0..total - 1 BY per_transaction LOOP
        mark := pg_current_wal_insert_lsn();
        INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
        SELECT 'order', 'key-' || (n % keys), 'created', bench_payload(n)
        FROM generate_series(base + start_at, base + least(start_at + per_transaction, total) - 1) AS n;
        COMMIT;
        IF neighbours > 0 THEN
            owed := owed + (pg_current_wal_insert_lsn() - mark) * neighbours / (1 - neighbours);
            WHILE owed > 0 LOOP
                mark := pg_current_wal_insert_lsn();
                INSERT INTO bench_neighbour (body) SELECT repeat('x', 200) || n FROM generate_series(1, 100) AS n;
                COMMIT;
                owed := owed - (pg_current_wal_insert_lsn() - mark);
            END LOOP;
        END IF;
    END LOOP;
END $$;
"""


def pgbench_script(keys: int, per_transaction: int) -> str:
    """One transaction."""
    return f"""INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
SELECT 'order', 'key-' || (n % {keys}), 'created', bench_payload(n)
FROM (SELECT nextval('bench_item') AS n FROM generate_series(1, {per_transaction})) AS rows;
"""
