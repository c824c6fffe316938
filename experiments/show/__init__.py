"""The `crossframe layout` and `crossframe plan` commands: who holds what, and what a step does when, of any model by name."""
