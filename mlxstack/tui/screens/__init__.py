"""One screen per question that an operator asks."""
