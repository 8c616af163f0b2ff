"""The words of the house as frozen values."""
