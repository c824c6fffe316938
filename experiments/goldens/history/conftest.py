"""Keeps pytest from importing the repository, whose modules import each other by names of their own."""

collect_ignore_glob = ["repository/*"]
