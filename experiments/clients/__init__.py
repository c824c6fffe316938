"""Trainers that this project did not write: README.md."""
