"""What two recordings are compared by: their quantities in order, how far each differs, and how far it may differ."""
