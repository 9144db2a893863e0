"""One file a group of commands: the record of its options, their checks, and the call downwards."""
