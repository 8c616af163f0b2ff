"""Contents of the screens as values: pure functions of the state."""
