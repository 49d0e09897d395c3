"""The command line. Each command has a module, which is imported only when the command runs."""
