"""The edge: Quart-Trio routes, schemas, server-sent events, and Hypercorn's connections."""
