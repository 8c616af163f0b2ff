"""Which model a request means."""

from mlxstack.core.errors import UnknownModel
from mlxstack.service.service import Service, plain


def names(service: Service) -> tuple[str, ...]:
    """Alias first, then the model's id. Folders of this machine are nobody's business."""
    return tuple(dict.fromkeys((service.name, plain(service.preset.model.id))))


def resolve_model(service: Service, wanted: str | None) -> str:
    """The name to echo. Any name is served by the one model unless the preset is strict."""
    if wanted is None:
        return service.name
    if service.preset.server.strict_models and wanted not in names(service):
        raise UnknownModel(f"model {wanted!r} is not served here; this is {service.name!r}")
    return wanted
