"""Measures servers with the OpenAI protocol from a client's side: `warpline bench serve`."""
