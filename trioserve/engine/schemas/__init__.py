"""JSON Schemas as the grammar engine takes them: what it enforces allows nothing that the schema forbids."""

from trioserve.engine.schemas.rewrite import enforceable

__all__ = ["enforceable"]
