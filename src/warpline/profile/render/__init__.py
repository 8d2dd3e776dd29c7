"""Renders a session as text for the terminal, as a page, as Markdown, and as a trace."""
