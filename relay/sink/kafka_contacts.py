"""First contacts of a session with partitions: which event may be sent, which travels alone, which must wait. Pure.

It never lets a second event go to a partition before the first was acknowledged there.
"""

from __future__ import annotations

from typing import NamedTuple

from relay.sink.kafka_partition import Hash
from relay.sink.kafka_tally import Ready

_KEYS = 10_000  # of a topic that is not wholly ready; those beyond take the longer way


class Contact(NamedTuple):
    """The first event to a partition in a session: until it is acknowledged, it travels alone.

    A broker that does not know the producer yet takes whatever comes first. If the first of two requests is turned
    away (the partition's leader is not ready yet) and the second is taken, the first is a duplicate to the broker when
    it comes again: acknowledged, and never stored.
    """

    topic: str
    partition: int


class Contacts:
    """Of one session. How many partitions a topic has is told at each call: topics can grow."""

    def __init__(self, hash_key: Hash) -> None:
        self.ready: Ready = {}  # topics of which every partition has acknowledged something; else keys that go to one
        self._hash = hash_key
        self._first: dict[str, dict[int, bool]] = {}  # of the others: partitions that got, or acknowledged, their first

    def meet(self, topic: str, key: bytes | None, partitions: int) -> tuple[str, Contact | None]:
        """Whether an event must wait ("contact", else ""), and whether it is the first to its partition."""
        contacts = self._first.setdefault(topic, {})
        if key is not None:
            partition = self._hash(key) % partitions
        else:  # where nobody was yet; when all are established, librdkafka chooses
            partition = next((number for number in range(partitions) if number not in contacts), -1)
        if partition < 0 or contacts.get(partition) is False:
            return "contact", None
        if key is not None and partition in contacts:
            keys = self.ready[topic]
            if keys is not None and len(keys) < _KEYS:
                keys.add(key)
            return "", None
        contacts[partition] = False
        return "", Contact(topic, partition)

    def establish(self, contact: Contact, partitions: int) -> None:
        """It was acknowledged."""
        contacts = self._first[contact.topic]
        contacts[contact.partition] = True
        if len(contacts) >= partitions and all(contacts.values()):
            self.ready[contact.topic] = None
        else:
            self.ready.setdefault(contact.topic, set())

    def forget(self, contact: Contact) -> None:
        """It was not sent, or was refused and the session goes on: the next is first."""
        del self._first[contact.topic][contact.partition]
