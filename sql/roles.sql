-- A role for the relay with the least rights that it needs; run once per outbox table. No password is set here:
--   ALTER ROLE outbox_relay PASSWORD '…';   or certificates, or peer; pg_hba.conf must allow the *database name* (the
-- keyword "replication" does not match logical replication).
-- REPLICATION lets a role read everything that is decoded in this database, so treat its password as a secret. Creating
-- such a role takes a superuser (from 16 on: CREATEROLE and REPLICATION). Amazon RDS: GRANT rds_replication TO … instead.
--
-- Writers need INSERT on the outbox table and nothing else (an identity column asks for no right on its sequence):
--   GRANT INSERT ON public.outbox_events TO shop;
\if :{?role}
\else
\set role outbox_relay
\endif
\if :{?schema}
\else
\set schema public
\endif
\if :{?table}
\else
\set table outbox_events
\endif
SELECT NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :'role') AS missing \gset
\if :missing
CREATE ROLE :"role" LOGIN REPLICATION;
\endif
-- end of psql variables

GRANT USAGE ON SCHEMA public TO :"role";
GRANT SELECT, INSERT, UPDATE, DELETE ON
    public.outbox_relay_checkpoint, public.outbox_relay_history, public.outbox_dead_letters,
    public.outbox_relay_bookmarks, public.outbox_relay_requests TO :"role";
GRANT SELECT ON public.outbox_relay_version TO :"role";
GRANT USAGE ON SCHEMA :"schema" TO :"role";
GRANT SELECT ON :"schema".:"table" TO :"role";
