"""Typed records of results and pages, and their JSON. Renders and judges nothing."""
