"""Audit structure: tensors, shapes, formats, names, hashes."""
