-- Which numbered files this database has, per component. `relay setup` runs what is newer than `version`.
CREATE TABLE IF NOT EXISTS public.outbox_relay_version (
    component  text PRIMARY KEY,
    version    int NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now()
);
