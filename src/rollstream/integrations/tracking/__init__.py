"""Trackers: one file for each system that is told how a run goes."""
