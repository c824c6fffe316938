"""Compatibility with torch: its dtypes and policy classes, and its registry of composable APIs. Imports no other folder."""
