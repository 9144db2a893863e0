"""Compiled codecs of the number formats, equal to their definitions bit for bit."""
