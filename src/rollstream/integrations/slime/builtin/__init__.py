"""Generators that come with rollstream: `--generators builtin`."""
