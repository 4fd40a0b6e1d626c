"""librdkafka's producer as both modes make it, and its log lines in ours.

An option that it does not take is an error of the configuration. Its log lines never decide whether something failed.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import structlog
from confluent_kafka import KafkaException, Producer

from relay.errors import ConfigError
from relay.sink.kafka_policy import Option

log = structlog.get_logger(__name__)

_AFTER = re.compile(r" \(after \d+ms.*")


class Logs:
    """librdkafka's log lines into ours. Also the only witness of the moment when the producer id is there."""

    def __init__(self, chatty: bool) -> None:
        self.chatty = chatty
        self.has_producer_id = False
        self._said: set[str] = set()

    def log(self, level: int, _form: str, facility: str, _client: str, text: str) -> None:
        if facility == "GETPID" and "Acquired PID" in text:
            self.has_producer_id = True
        if facility == "CONFWARN" and "enable.gapless.guarantee" in text:
            return  # our own default, which librdkafka calls experimental
        if level <= logging.DEBUG and not self.chatty:
            return
        # It tries again many times a second, and says each time the same; whether it is an error, is for us to judge.
        gist = _AFTER.sub("", text)
        if self.chatty or gist not in self._said:
            self._said.add(gist)
            log.log(min(level, logging.WARNING), "librdkafka.said", facility=facility, text=text)


def make_producer(options: Mapping[str, Option], complained: Callable[[Any], None], logs: Logs) -> Producer:
    """`complained` is its error_cb."""
    try:
        return Producer({**options, "error_cb": complained, "logger": logs})
    except (KafkaException, TypeError, ValueError) as exc:
        reason = exc.args[0].str() if isinstance(exc, KafkaException) else str(exc)
        raise ConfigError([f"sink.kafka.options: {reason}"]) from None
