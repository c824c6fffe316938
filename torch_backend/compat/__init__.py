"""Compatibility with torch: dtypes, policies that scripts import from torch, and the registry of composable APIs."""
