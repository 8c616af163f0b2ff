"""Asyncio use cases over the engine."""
