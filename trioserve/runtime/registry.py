"""Which models there are. Lookups never wait; no lock is held across any wait."""

from __future__ import annotations

from collections.abc import Iterator

from trioserve.errors import InvalidRequestError, ModelNotFoundError
from trioserve.runtime.model import Model


class Registry:
    """The registered models, in the order of their registration.

    Registrations are never taken back: a model that isn't wanted is unloaded.
    """

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}

    def __iter__(self) -> Iterator[Model]:
        return iter(list(self._models.values()))

    def add(self, model: Model) -> None:
        """Register a model under an id that is free."""
        if model.id in self._models:
            raise ValueError(f"{model.id!r} is registered already")
        self._models[model.id] = model

    def get(self, model_id: str) -> Model | None:
        """Return the model of that id, if there is one."""
        return self._models.get(model_id)

    def find(self, model_id: str | None) -> Model:
        """Return the model a request names, or the only one where it names none.

        Raises:
            ModelNotFoundError: no such model.
            InvalidRequestError: none was named and there are several.
        """
        if model_id is None:
            if len(self._models) == 1:
                return next(iter(self._models.values()))
            names = ", ".join(sorted(self._models)) or "none"
            raise InvalidRequestError(f"model is required: the registered ones are {names}", param="model")
        try:
            return self._models[model_id]
        except KeyError:
            raise ModelNotFoundError(f"the model {model_id[:100]!r} does not exist", param="model") from None
