"""The parsers of all commands, with their help. They import nothing that takes time."""
