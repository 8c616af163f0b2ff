"""Asyncio use cases between the doors and the engine."""
