"""Helpers that tests share and that are no fixtures."""
