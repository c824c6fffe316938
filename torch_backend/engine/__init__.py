"""One training step of sharded modules, for both APIs: units and buckets, their hooks, and the order of what they do."""
