"""Adopted faults: descriptions that were saved as data, and are named from then on."""
