"""`warpline serve`: the OpenAI API over one engine. `app.create_app` makes the ASGI app, `run.serve` runs it."""
