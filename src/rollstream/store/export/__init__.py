"""Exporters: the artifact in other formats."""
