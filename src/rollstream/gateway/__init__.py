"""Calls of a chat API, answered by the run's engine and recorded as exact-token trajectories."""
