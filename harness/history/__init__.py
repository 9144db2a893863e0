"""All runs of all nights, and what they tell: the store, changes, the ledger of known failures.

Owns the telling of old runs; it reads records, so that a night of last year is told without torch,
a GPU or the checkpoint.
"""
