"""How long things take, measured beside something that every machine can do."""
