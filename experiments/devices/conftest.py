"""Scripts are run as programs, not collected: importing them imports whole frameworks."""

collect_ignore_glob = ["scripts/*"]
