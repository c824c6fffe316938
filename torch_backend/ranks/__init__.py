"""Communication between ranks: all collectives, errors when one fails, detection of hangs, agreement through the store."""
