"""The cpu executor: many tokens in one call of compiled code, on a team of threads."""
