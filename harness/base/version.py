"""The version of degarble."""

VERSION = "0.1.0"
