"""Numerical checks of any server with OpenAI's interface, from outside."""
