"""Programs are run, not collected: they read their command line when they are imported."""

collect_ignore_glob = ["jax_*", "torch_*"]
