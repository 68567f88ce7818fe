"""The command line: commands, their options, and exit codes."""
