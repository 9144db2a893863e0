"""Mixture of experts: routed and shared experts."""
