-- UUIDv7 (RFC 9562) for servers before 18: 48 bits of Unix milliseconds, version 7, variant 10, 74 random bits.
-- Ids that grow with time keep the unique index append-only. RETURN binds every name now, whatever the caller's search_path.
\if :{?schema}
\else
\set schema public
\endif
-- end of psql variables

CREATE OR REPLACE FUNCTION :"schema".outbox_uuidv7() RETURNS uuid
LANGUAGE sql VOLATILE PARALLEL SAFE
-- The random uuid has version 4 (0100) and the variant already: setting two bits makes it 7 (0111).
RETURN encode(
    set_bit(
        set_bit(
            overlay(
                uuid_send(gen_random_uuid())
                PLACING substring(int8send(floor(extract(epoch FROM clock_timestamp()) * 1000)::bigint) FROM 3)
                FROM 1 FOR 6
            ),
            52, 1
        ),
        53, 1
    ),
    'hex'
)::uuid;
