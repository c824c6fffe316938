"""The `crossframe` command line: commands and their options, and how they print and end."""
