"""`relay …` and `python -m relay …`."""

from __future__ import annotations

import sys

from relay import daemon


def main() -> None:
    asked = daemon.usual(sys.argv[1:])
    if asked is None:
        from relay.cli import main  # noqa: PLC0415

        main()
    else:
        config, from_now = asked
        daemon.run(config, from_now=from_now)


if __name__ == "__main__":
    main()
