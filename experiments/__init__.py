"""Experiments: models in both frameworks, parity runs, reports, and the `crossframe` command."""
