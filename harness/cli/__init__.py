"""The command line: parsing, help, messages and exit status. The work is in harness/commands."""
