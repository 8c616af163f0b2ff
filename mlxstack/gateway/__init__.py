"""Gateway: one address for several services, which it starts, fills and empties."""
