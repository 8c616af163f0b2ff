"""What each screen says, as plain values: pure functions of the model."""
