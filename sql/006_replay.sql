-- Replay: points to replay from, and replays that the active relay does itself because it alone may write to its streams.

-- Where the snapshot of a row of history was taken, and where the WAL ended when the row was written: a replay that ends
-- at a point needs a snapshot from behind it.
ALTER TABLE public.outbox_relay_history ADD COLUMN IF NOT EXISTS snap_lsn pg_lsn;
ALTER TABLE public.outbox_relay_history ADD COLUMN IF NOT EXISTS wal_lsn pg_lsn;

-- Named points: everything that snap sees was published before it.
CREATE TABLE IF NOT EXISTS public.outbox_relay_bookmarks (
    relay text NOT NULL,
    name  text NOT NULL,
    at    timestamptz NOT NULL DEFAULT now(),
    lsn   pg_lsn NOT NULL,
    snap  pg_snapshot NOT NULL,
    PRIMARY KEY (relay, name)
);

-- What the active relay is asked to do. To cancel one: UPDATE … SET state = 'failed', error = 'cancelled'.
CREATE TABLE IF NOT EXISTS public.outbox_relay_requests (
    id           bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    relay        text NOT NULL,
    run          text NOT NULL,                -- as in the header relay-replayed
    selection    jsonb NOT NULL,               -- which rows, and where to
    state        text NOT NULL DEFAULT 'requested' CHECK (state IN ('requested', 'running', 'done', 'failed')),
    published    bigint NOT NULL DEFAULT 0,
    skipped      bigint NOT NULL DEFAULT 0,    -- rows that have never been routable
    total        bigint,
    place        jsonb,                        -- table and seq up to which it is done: a restart continues here
    error        text,
    requested_at timestamptz NOT NULL DEFAULT now(),
    updated_at   timestamptz NOT NULL DEFAULT now()
);
CREATE INDEX IF NOT EXISTS outbox_relay_requests_open_idx
    ON public.outbox_relay_requests (relay, id) WHERE state IN ('requested', 'running');

INSERT INTO public.outbox_relay_version AS v (component, version) VALUES ('relay', 6)
ON CONFLICT (component) DO UPDATE SET version = excluded.version, applied_at = now() WHERE v.version < excluded.version;
