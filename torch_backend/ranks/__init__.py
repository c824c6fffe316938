"""Communication between ranks: every collective, what happens when one fails, and agreement through the store."""
