"""Profiles where time goes: collect → `Session` (one JSON file) → tree, classes, roofline, verdict → render."""
