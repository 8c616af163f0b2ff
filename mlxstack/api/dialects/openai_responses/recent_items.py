"""Output items of the last responses, by their ids.

The Vercel AI SDK sends an `item_reference` in place of an item unless `store` is false. Responses
are not stored here; their items stay in memory, and the oldest go first.
"""

from collections import OrderedDict

import msgspec

from mlxstack.api.dialects.openai_responses.request_schema import Item
from mlxstack.api.dialects.openai_responses.response_schema import OutputItem
from mlxstack.core.errors import BadRequest

MAX_BYTES = 1 << 25
OPTIONAL = "rs_"
"""Ids of reasoning, without which an answer stays the same."""


class RecentItems:
    """Items by salt and id; `max_bytes` of JSON in all."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._items: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._n_bytes = 0

    def add(self, item: OutputItem, salt: str) -> None:
        """Keep an item for requests with the same salt."""
        encoded = msgspec.json.encode(item)
        self._items[salt, item.id] = encoded
        self._n_bytes += len(encoded)
        while self._n_bytes > self._max_bytes:
            _, oldest = self._items.popitem(last=False)
            self._n_bytes -= len(oldest)

    def resolve(self, items: list[Item], salt: str) -> list[Item]:
        """Items in place of the references to them.

        Raises BadRequest for one that is not kept, but for reasoning, whose reference stays, so
        that errors name the places of the items that were sent.
        """
        return [self._find(item, f"input[{i}]", salt) for i, item in enumerate(items)]

    def _find(self, item: Item, path: str, salt: str) -> Item:
        kind = item.get("type")
        # The type of a reference is optional.
        if kind != "item_reference" and (kind is not None or "role" in item or "id" not in item):
            return item
        name = str(item.get("id"))
        if (salt, name) in self._items:
            self._items.move_to_end((salt, name))
            return msgspec.json.decode(self._items[salt, name], type=Item)
        if name.startswith(OPTIONAL):
            return {"type": "item_reference", "id": name}
        # Clients match the first words.
        raise BadRequest(
            f"{path}: Item with id {name!r} not found: it is not kept any more; send the item "
            "itself (AI SDK: providerOptions.openai.store = false)",
            path,
        )
