"""Hears the application's NOTIFY, so that polling need not wait for its next look. A hint only: polling goes on."""

from __future__ import annotations

from collections.abc import Callable

from psycopg import sql

from relay.config import Config
from relay.source.session import LASTING, connect, translated


async def listen(config: Config, wake: Callable[[], None]) -> None:
    """Call `wake` at every NOTIFY on `poll.notify`, until cancelled; raises when Postgres goes away."""
    async with await connect(config.database, f"{config.relay.name} notify", options=LASTING) as session:
        with translated():
            await session.execute(sql.SQL("LISTEN {}").format(sql.Identifier(config.poll.notify)))
            wake()  # what was committed before we listened was announced to nobody
            async for _ in session.notifies():
                wake()
