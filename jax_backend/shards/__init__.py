"""The pytree of shards: where every parameter lies, how shards are made, and their full values (unshard, writeback, summon)."""
