"""What an answer is made of, read from its text piece by piece."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """More of what is said to the user. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers. Never empty."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A tool is called. Calls count from 0."""

    call: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of a call's arguments. Never empty."""

    call: int
    text: str


Event = Content | Reasoning | CallBegun | Arguments
