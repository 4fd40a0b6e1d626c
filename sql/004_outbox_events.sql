-- The outbox table. Applications insert into it in the transaction of their business change:
--   INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload) VALUES ('order', '42', 'created', '{…}');
\if :{?schema}
\else
\set schema public
\endif
\if :{?table}
\else
\set table outbox_events
\endif
\set component 'outbox:' :schema '.' :table
\set xid_index :table '_xid_idx'
\set unpublished_index :table '_unpublished_idx'
\set waiting_index :table '_waiting_idx'
SELECT CASE WHEN current_setting('server_version_num')::int >= 180000 THEN 'uuidv7()'
       ELSE quote_ident(:'schema') || '.outbox_uuidv7()' END AS uuidv7 \gset
-- end of psql variables

-- seq is the primary key because it is the order in which the table is read, and because it can also be the partition
-- key of the partitioned variant; id is unique beside it, because a second event with the id of a first would be swallowed
-- by every consumer that dedupes. Nobody but Postgres sets seq and xid.
CREATE TABLE IF NOT EXISTS :"schema".:"table" (
    seq             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id              uuid NOT NULL DEFAULT :uuidv7 UNIQUE,     -- the event id, on every path
    aggregate_type  text,
    aggregate_id    text,                                     -- order is kept per aggregate
    event_type      text,
    topic           text,                                     -- explicit destination; else by the routing
    partition_key   text,                                     -- overrides the key of the routing
    payload         jsonb,
    headers         jsonb,
    created_at      timestamptz NOT NULL DEFAULT now(),
    xid             xid8 NOT NULL DEFAULT pg_current_xact_id(),
    -- Claim polling only. They stand last so that reading the WAL can stop before them.
    published_at    timestamptz,
    attempts        int NOT NULL DEFAULT 0,
    next_attempt_at timestamptz,
    last_error      text
);
-- "What did snapshot S not see": for recovery, polling and replay. btree, because BRIN has no operator class for xid8.
CREATE INDEX IF NOT EXISTS :"xid_index" ON :"schema".:"table" (xid);
CREATE INDEX IF NOT EXISTS :"unpublished_index" ON :"schema".:"table" (seq) WHERE published_at IS NULL;
-- The few that claim polling holds back; empty otherwise, so it costs inserts nothing.
CREATE INDEX IF NOT EXISTS :"waiting_index" ON :"schema".:"table" (next_attempt_at)
    WHERE published_at IS NULL AND next_attempt_at IS NOT NULL;

INSERT INTO public.outbox_relay_version AS v (component, version) VALUES (:'component', 4)
ON CONFLICT (component) DO UPDATE SET version = excluded.version, applied_at = now() WHERE v.version < excluded.version;
