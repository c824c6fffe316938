"""The user's modules before sharding: which parameters each unit owns, ignored ones, buffers, nested inputs, materialisation."""
