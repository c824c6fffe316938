"""Communication between ranks: all collectives, and agreement between processes."""
