"""Scripts train when they are run, and are not collected."""

collect_ignore_glob = ["scripts/*.py"]
