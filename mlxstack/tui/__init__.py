"""The dashboard, a client like any other."""
