"""Operations that clients request of a service."""
