"""One module per family of routes; each registers itself on an application."""
