"""The command line: arguments and printing; the work is in `motet.api`."""
