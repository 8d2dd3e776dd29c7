"""Quality checks: executors compared value by value, and how well a model predicts a text."""
