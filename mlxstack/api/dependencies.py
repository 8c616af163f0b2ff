"""What a handler is given beside its request."""

from litestar.di import NamedDependency

from mlxstack.service.service import Service

TheService = NamedDependency[Service]
