"""A decode step as a table of ops, run kernel by kernel or captured as a graph; and the passes over prompts."""
