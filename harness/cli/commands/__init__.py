"""One module a group of commands: the options, their checks, and the call into harness/commands."""
