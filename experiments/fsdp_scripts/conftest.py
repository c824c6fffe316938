"""Scripts train when they are imported, and are not collected."""

collect_ignore_glob = ["*/*/*.py"]
