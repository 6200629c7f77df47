"""Tokens in, tokens out. The engine is synchronous and knows no Trio and no HTTP."""
