"""The few widgets that draw what the views say."""
