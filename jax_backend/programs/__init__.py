"""Programs as jaxprs and as XLA compiled them: their collectives, and a jaxpr that is rewritten."""
