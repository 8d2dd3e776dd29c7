"""The command line: one file per verb. It parses and prints; everything else is the library's work."""
