"""python -m relay"""

from __future__ import annotations

from relay.cli import main

if __name__ == "__main__":
    main()
