"""Shared basics of all packages: errors, version, protocols, input files, masking of passwords."""
