"""Scripts in the way of public JAX code, written down with the answers to expect of `crossframe record` before it saw them."""
