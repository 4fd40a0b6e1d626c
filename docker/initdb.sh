# Runs once, in a new cluster (docker/postgres/entrypoint): who may do what. The application owns its database; the
# relay may only read the outbox and keep its own tables, which `relay setup --role` grants.
sql -d postgres -v shop="$(</run/secrets/shop-password)" -v relay="$(</run/secrets/relay-password)" <<'SQL'
CREATE ROLE shop LOGIN PASSWORD :'shop';
CREATE ROLE outbox_relay LOGIN REPLICATION PASSWORD :'relay';
CREATE DATABASE shop OWNER shop;
SQL
