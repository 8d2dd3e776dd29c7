"""Servers that speak the OpenAI protocol, measured from a client's side: `warpline bench serve`."""
