"""Skeleton, style, script and icon of a report page. Read as text, never imported."""
