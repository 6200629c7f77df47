"""A closed-loop load on any OpenAI-compatible server: ``python -m trioserve.bench URL MODEL``.

Knows servers from outside only and imports no other room of the package. Needs the extra ``bench`` (httpx).
"""
