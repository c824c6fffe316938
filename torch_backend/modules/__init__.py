"""The user's modules before they are sharded: which parameters each unit owns, buffers, inputs, and materialisation."""
