"""The command line: parsing, help, messages and exit status. What a command does lives below."""
