"""`relay bench`: how fast, how late, at what cost, on your machine, and beside it the limit (`pg_recvlogical`).

    plan.py       what is measured: scenarios and options, as data; modes.py ways of reading and writing, by name
    arena.py      where: servers, and per round a fresh database; load.py its rows
    broker.py     the broker as seen from outside: what it has stored; proxy.py makes it slow
    tools.py      who: the relay, `pg_recvlogical`; peers.py the door for rivals; contest.py who is set against whom
    scenarios.py  how: drain.py, kill.py, paced.py, with what task.py shares
    subscriber.py listens, in a process of its own; kafka_fetch.py reads Kafka's socket, notes.py keeps what it heard
    runner.py     rounds, interleaved
    result.py     the figures (pure); figures.py how they are called and written
    render.py     tables; export.py CSV; html.py, picture.py and svg.py plots; compare.py two results
    command.py    what the options of cli_bench.py lead to

Everything is measured from outside the process under test. It must never touch a table, stream or topic that it did
not create, and it leaves nothing behind: no process, no database, no slot, no stream.
"""

from __future__ import annotations
