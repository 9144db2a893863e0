"""Audit numbers: scales, codes and values, alone and among siblings."""
