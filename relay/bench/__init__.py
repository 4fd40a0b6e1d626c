"""`relay bench`: how fast, how late, at what cost, on your machine, and beside it the limit (`pg_recvlogical`).

    plan.py       what is measured: scenarios, modes, sinks, as data
    arena.py      where: servers, and per round a fresh database and its rows
    broker.py     the broker as seen from outside: what it has stored
    tools.py      who: the relay, `pg_recvlogical`; later the rivals
    scenarios.py  how: drain, steady, idle
    runner.py     rounds, interleaved
    result.py     the figures (pure), render.py the table

Everything is measured from outside the process under test. It must never touch a table, stream or topic that it did
not create, and it leaves nothing behind: no process, no database, no slot, no stream.
"""

from __future__ import annotations
