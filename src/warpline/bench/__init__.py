"""Measurements under one protocol, kept as rows with their provenance."""
