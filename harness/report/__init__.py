"""Typed records of results and report pages, and their JSON. Rendering is in reports/."""
