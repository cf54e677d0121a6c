"""Servers that rollstream starts: planned, here or on Ray, watched, started again, ended with the run."""
