"""Plugins of degarble for other programs: pytest."""
