"""Kinds of turns of known clients."""
