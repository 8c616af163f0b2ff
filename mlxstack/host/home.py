"""Directory layout under $MLX_STACK_HOME."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from mlxstack.core.errors import SetupError

HOME_VARIABLE = "MLX_STACK_HOME"


class Home(Struct, frozen=True):
    """Private (0700) folders under `root`."""

    root: Path

    @property
    def run(self) -> Path:
        """PID files, states and specs of the services."""
        return self.root / "run"

    @property
    def logs(self) -> Path:
        """One rotating log per service."""
        return self.root / "logs"

    @property
    def agents(self) -> Path:
        """Histories and manifests of the agents."""
        return self.root / "agents"

    @property
    def kv(self) -> Path:
        """Stored KV, by identity."""
        return self.root / "kv"

    @property
    def slots(self) -> Path:
        """Slot files of presets that name no `slots.save_path`."""
        return self.root / "slots"

    @property
    def presets(self) -> Path:
        """Presets of this user; they take precedence over builtin ones."""
        return self.root / "presets"

    @property
    def derived_presets(self) -> Path:
        """Presets that were derived from models, by the model's name."""
        return self.root / "derived"

    @property
    def writes_file(self) -> Path:
        """Bytes written to disk by day."""
        return self.root / "writes.sqlite3"

    @property
    def usage_file(self) -> Path:
        """Sums of finished requests."""
        return self.root / "usage.sqlite3"

    @property
    def soak_file(self) -> Path:
        """Record of the last `verify --soak`."""
        return self.root / "soak.json"

    @property
    def mac_report_file(self) -> Path:
        """Report of the last `verify --mac`."""
        return self.root / "verify-mac.json"

    @property
    def tool_reports(self) -> Path:
        """Last report of `verify --tools` on each model."""
        return self.root / "tool-reports"

    def pid_file(self, name: str) -> Path:
        """The supervisor's process id, a plain number."""
        return self.run / f"{name}.pid"

    def state_file(self, name: str) -> Path:
        """State of the service, written by its supervisor."""
        return self.run / f"{name}.json"

    def spec_file(self, name: str) -> Path:
        """Spec of the service for its supervisor."""
        return self.run / "plans" / f"{name}.json"

    def preset_file(self, name: str) -> Path:
        """The resolved preset that the worker reads."""
        return self.run / "presets" / f"{name}.json"

    def gateway_file(self, name: str) -> Path:
        """Spec of a gateway for its worker."""
        return self.run / "gateways" / f"{name}.json"

    @property
    def memory(self) -> Path:
        """KV bytes that running services hold."""
        return self.run / "memory"

    def memory_file(self, name: str) -> Path:
        """KV bytes of a service, written by its worker."""
        return self.memory / f"{name}.json"

    @property
    def agent_members_file(self) -> Path:
        """Members of gateways that served agents last, by agent."""
        return self.run / "agents" / "members.json"

    def handover_file(self, handover: str) -> Path:
        """Resolved preset for a running service, by a random id."""
        return self.run / "handovers" / f"{handover}.json"

    def log_file(self, name: str) -> Path:
        """Log of the worker."""
        return self.logs / f"{name}.log"

    def supervisor_log(self, name: str) -> Path:
        """Output of the supervisor, usually empty."""
        return self.logs / f"{name}.supervisor.log"


def home_from(env: Mapping[str, str]) -> Home:
    """`$MLX_STACK_HOME`, or `~/.mlx-stack`; nothing is created. Raises SetupError."""
    place = env.get(HOME_VARIABLE) or "~/.mlx-stack"
    try:
        return Home(Path(place).expanduser().absolute())
    except RuntimeError as error:
        raise SetupError(
            f"cannot expand {place}: no such user; set {HOME_VARIABLE} to another folder"
        ) from error


def make_folder(folder: Path) -> None:
    """Create a folder and its parents with 0700. Raises SetupError."""
    try:
        missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
        for parent in reversed(missing):
            parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SetupError(
            f"the folder {folder} cannot be created ({error.strerror}: {error.filename}); "
            "choose another place or make its parent writable"
        ) from error
    if not folder.is_dir():
        raise SetupError(f"{folder} is a file, but a folder is needed there")


def make_home(home: Home) -> None:
    """Create the folders that running a service needs."""
    for folder in (home.run / "plans", home.run / "presets", home.logs):
        make_folder(folder)
