"""The gateway as a server: sessions of agents elsewhere, into a run directory or a buffer."""
