"""Instruments of quality: what executors compute, side by side, and how well a model predicts a text."""
