"""A closed-loop load on any OpenAI-compatible server: ``trioserve bench URL``.

Knows servers from outside only and imports no other room of the package. Needs the extra ``bench`` (httpx).
"""
