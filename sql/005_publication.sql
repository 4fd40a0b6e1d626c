-- The publication: inserts only, and a partitioned table under its own name. It must exist before the slot: decoding looks
-- it up as it was when the WAL was written. Never drop it while a relay runs; ALTER PUBLICATION … ADD TABLE is fine.
\if :{?publication}
\else
\set publication outbox_relay
\endif
\if :{?tables}
\else
\set tables public.outbox_events
\endif
SELECT NOT EXISTS (SELECT FROM pg_publication WHERE pubname = :'publication') AS missing \gset
\if :missing
\else
\quit
\endif
-- end of psql variables

CREATE PUBLICATION :"publication" FOR TABLE :tables WITH (publish = 'insert', publish_via_partition_root = true);
