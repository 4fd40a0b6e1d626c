"""The chaos verifier: faults from a seed, writers with a journal of their own, and an independent look at the broker.

It knows the relay by its command line, its configuration keys and its admin page only; what the broker must hold it
asks the outbox table and the writers' journal, what the broker does hold it reads with the broker's own client.
"""
