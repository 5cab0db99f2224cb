"""One step's orders as tests make them and look at them."""

from __future__ import annotations

from typing import Any

from kvferry.connector.p2p.orders import HandoffMetadata, RequestOrders


def ordered(request_id: str, **orders: Any) -> HandoffMetadata:
    """Return a step's orders that are about one request."""
    return HandoffMetadata((RequestOrders(request_id, **orders),))


def orders_of(metadata: HandoffMetadata, kind: str) -> dict[str, Any]:
    """Return the orders of one kind, an attribute of `RequestOrders`, by request."""
    return {orders.request_id: order for orders in metadata.requests if (order := getattr(orders, kind))}
