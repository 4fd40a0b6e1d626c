"""Ports of private servers: no two processes are given the same one, even before somebody listens on it."""

from __future__ import annotations

import subprocess
import sys

COUNT = 250
# Both begin to look at the same place, and the first is still there when the second one looks.
CODE = f"""
import random, sys
from relay.embedded.process import free_port
random.seed(1)
print(*(free_port() for _ in range({COUNT})), flush=True)
sys.stdin.read()
"""


def test_no_port_is_given_to_two_processes() -> None:
    command = [sys.executable, "-c", CODE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None
        one = set(first.stdout.readline().split())
        other = set(subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True).stdout.split())
    assert len(one) == len(other) == COUNT
    assert not one & other
