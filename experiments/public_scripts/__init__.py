"""Training scripts of public repositories, recorded as they are."""
