"""Formats of others: an artifact as preference pairs, a Hugging Face dataset, ATIF, inspect."""
