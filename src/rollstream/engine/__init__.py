"""Engines: what turns prompt ids into response ids."""
