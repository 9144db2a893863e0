"""History of nightly runs: the store, changes between nights, and the ledger of known failures.

It reads records only, so old runs can be explained without torch, a GPU or the checkpoint.
"""
