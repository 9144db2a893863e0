"""Embedded server: OpenAI's HTTP interface over a reference, for small models and debugging."""
