-- The relay's own tables. They live in the database of the outbox, so that they travel with failover, backup and PITR:
-- a restored database shows a checkpoint that fits its own LSNs and transaction ids.

-- One row per relay, updated about once a second while events move. The low fillfactor leaves room on the page, so that
-- every update is HOT: no index entry, and the old versions are pruned in place.
CREATE TABLE IF NOT EXISTS public.outbox_relay_checkpoint (
    relay             text PRIMARY KEY,
    epoch             bigint NOT NULL,          -- fencing: a successor raises it, a zombie's UPDATE then finds no row
    system_identifier text NOT NULL,
    timeline          int NOT NULL,
    slot              text NOT NULL,
    lsn               pg_lsn NOT NULL,          -- everything committed before this is published
    snap              pg_snapshot NOT NULL,     -- every transaction visible here is published
    snap_lsn          pg_lsn NOT NULL,          -- WAL insert position sampled right after snap: where skipping ends at start
    fingerprint       text NOT NULL DEFAULT '', -- of the routing: a change makes broker positions untrustworthy
    phase             text NOT NULL DEFAULT 'stream',
    recovery          jsonb,                    -- the round of polling that is under way
    sink              jsonb,                    -- how far the broker's destinations are covered by lsn
    readback          jsonb,                    -- … and by snap: a recovery reads back what is behind
    unseen            jsonb NOT NULL DEFAULT '{}', -- events published before lsn, by transactions that snap does not see
    updated_at        timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 20, autovacuum_vacuum_threshold = 1000, autovacuum_vacuum_scale_factor = 0);

-- About a row a minute while events move: makes any saved LSN or time replayable from the table.
CREATE TABLE IF NOT EXISTS public.outbox_relay_history (
    relay text NOT NULL,
    at    timestamptz NOT NULL DEFAULT now(),
    lsn   pg_lsn NOT NULL,
    snap  pg_snapshot NOT NULL
);
CREATE INDEX IF NOT EXISTS outbox_relay_history_relay_at_idx ON public.outbox_relay_history (relay, at);

-- Events that the sink can never take (dead), and later events of the same key that wait behind them (parked).
-- What was to be published is kept as bytes: a redrive publishes exactly that, under the same event id.
CREATE TABLE IF NOT EXISTS public.outbox_dead_letters (
    id             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, -- order of arrival: parked events leave in this order
    relay          text NOT NULL,
    event_id       text NOT NULL,
    table_name     text NOT NULL,
    seq            bigint,
    aggregate_type text,
    aggregate_id   text,
    event_type     text,
    project        text,                     -- whose event it is, where operators see only their own
    topic          text NOT NULL,
    key            bytea,
    headers        jsonb NOT NULL DEFAULT '[]', -- pairs [name, value] in order: a header may repeat
    body           bytea,                    -- NULL is a tombstone
    position       text NOT NULL,            -- as in the header relay-position
    state          text NOT NULL DEFAULT 'dead'
                   CHECK (state IN ('dead', 'parked', 'retry_requested', 'resolved')),
    reason         text NOT NULL,
    error_class    text NOT NULL,
    attempts       int NOT NULL DEFAULT 1,
    first_error_at timestamptz NOT NULL DEFAULT now(),
    last_error_at  timestamptz NOT NULL DEFAULT now(),
    resolved_at    timestamptz,
    UNIQUE (relay, event_id)                 -- an event that is rejected again after a crash is the same dead letter
);
-- "Is this key blocked?" and "what is open?" look only at the few that are not resolved.
CREATE INDEX IF NOT EXISTS outbox_dead_letters_open_idx
    ON public.outbox_dead_letters (relay, key, id) WHERE state <> 'resolved';

INSERT INTO public.outbox_relay_version AS v (component, version) VALUES ('relay', 2)
ON CONFLICT (component) DO UPDATE SET version = excluded.version, applied_at = now() WHERE v.version < excluded.version;
