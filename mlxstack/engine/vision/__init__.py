"""Vision towers, which turn pixels into features of a text model."""
