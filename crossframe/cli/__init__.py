"""The command `crossframe`."""
