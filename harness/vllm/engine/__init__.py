"""Proof of the plugin in a running engine: prepared answers, servers, steps and planted faults."""
