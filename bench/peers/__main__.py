"""`python -m bench.peers` installs what the peers need, and says where it is."""

from __future__ import annotations

import sys

from bench.peers import install, java
from relay.embedded.process import EmbeddedError

if __name__ == "__main__":
    try:
        install.install()
    except EmbeddedError as error:
        sys.exit(f"{error}\n{error.hint}")
    found = java.find()
    assert found is not None  # installed, else install() had raised
    print(f"Debezium Server {install.VERSION}: {install.folder()}")
    print(f"Java {found.version}: {found.path}")
    print('measure:  make bench ARGS="--peer debezium-lean --peer poller"')
