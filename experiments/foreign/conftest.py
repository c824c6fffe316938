"""Scripts are run as programs in environments of their own, not collected."""

collect_ignore_glob = ["*/*.py"]
