"""Routed and shared experts."""
