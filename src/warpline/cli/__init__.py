"""The command line: one file per verb. Parses and prints; everything else is the library's."""
