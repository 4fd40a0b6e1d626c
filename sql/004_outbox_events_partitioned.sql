-- The outbox table, partitioned: retention drops a partition instead of deleting rows.
-- By seq and not by created_at: only Postgres sets seq, so that no writer's clock chooses the partition; the primary key
-- stays (seq); pages in seq order touch one partition at a time; and "all of it is published" is a question about few rows.
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
\set id_index :table '_id_idx'
\set default_partition :table '_default'
SELECT CASE WHEN current_setting('server_version_num')::int >= 180000 THEN 'uuidv7()'
       ELSE quote_ident(:'schema') || '.outbox_uuidv7()' END AS uuidv7 \gset
-- end of psql variables

CREATE TABLE IF NOT EXISTS :"schema".:"table" (
    seq             bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id              uuid NOT NULL DEFAULT :uuidv7,            -- the event id, on every path; unique in each partition
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
) PARTITION BY RANGE (seq);
CREATE INDEX IF NOT EXISTS :"xid_index" ON :"schema".:"table" (xid);
CREATE INDEX IF NOT EXISTS :"unpublished_index" ON :"schema".:"table" (seq) WHERE published_at IS NULL;
-- The few that claim polling holds back; empty otherwise, so it costs inserts nothing.
CREATE INDEX IF NOT EXISTS :"waiting_index" ON :"schema".:"table" (next_attempt_at)
    WHERE published_at IS NULL AND next_attempt_at IS NOT NULL;
-- A unique index of the whole table would have to contain seq, and then says nothing: it is unique per partition.
CREATE INDEX IF NOT EXISTS :"id_index" ON :"schema".:"table" (id);

-- No insert ever fails for want of a partition.
CREATE TABLE IF NOT EXISTS :"schema".:"default_partition" PARTITION OF :"schema".:"table" DEFAULT;

-- Keeps `ahead` empty partitions of `rows` rows each in front of the newest event; returns how many it made. Call it from
-- a scheduler, or run `relay setup` again. New ones start behind what the default partition already took.
-- They are made aside and then attached, which does not lock writers out.
CREATE OR REPLACE FUNCTION :"schema".outbox_add_partitions(parent regclass, ahead int DEFAULT 3, rows bigint DEFAULT 10000000)
RETURNS int LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $function$
DECLARE
    home    text;
    stem    text;
    spare   regclass;
    newest  bigint;   -- highest seq given out
    covered bigint;   -- where the last partition ends
    start   bigint;
    made    int := 0;
    part    text;
BEGIN
    SELECT n.nspname, c.relname INTO STRICT home, stem
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = parent;
    SELECT partdefid INTO STRICT spare FROM pg_partitioned_table WHERE partrelid = parent;
    -- One at a time: two schedulers would make the same partition.
    PERFORM pg_advisory_xact_lock(hashtextextended('outbox_add_partitions:' || home || '.' || stem, 0));
    EXECUTE format('SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM %s',
                   pg_get_serial_sequence(format('%I.%I', home, stem), 'seq')) INTO newest;
    IF spare <> 0 THEN
        EXECUTE format('SELECT greatest(%s, coalesce(max(seq), 0)) FROM %s', newest, spare) INTO newest;
    END IF;
    SELECT coalesce(max(substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''(\d+)''\)')::bigint), 0) INTO covered
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = parent;
    -- The first one begins at 0; later ones where the last ends, or at the next round number if events ran past it.
    start := CASE WHEN covered > newest OR newest = 0 THEN covered ELSE (newest / rows + 1) * rows END;
    WHILE start <= (newest / rows + ahead) * rows LOOP
        part := format('%I.%I', home, stem || '_' || start);
        EXECUTE format('CREATE TABLE %s (LIKE %s INCLUDING DEFAULTS INCLUDING CONSTRAINTS)', part, parent);
        EXECUTE format('CREATE UNIQUE INDEX ON %s (id)', part);
        -- Proves the bounds beforehand, so that attaching does not scan.
        EXECUTE format('ALTER TABLE %s ADD CONSTRAINT bounds CHECK (seq >= %s AND seq < %s)', part, start, start + rows);
        EXECUTE format('ALTER TABLE %s ATTACH PARTITION %s FOR VALUES FROM (%s) TO (%s)', parent, part, start, start + rows);
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT bounds', part);
        start := start + rows;
        made := made + 1;
    END LOOP;
    RETURN made;
END
$function$;

SELECT :"schema".outbox_add_partitions(format('%I.%I', :'schema', :'table')::regclass);

INSERT INTO public.outbox_relay_version AS v (component, version) VALUES (:'component', 4)
ON CONFLICT (component) DO UPDATE SET version = excluded.version, applied_at = now() WHERE v.version < excluded.version;
