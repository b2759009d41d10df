"""The only reader of the environment: what this machine's user has set, as one value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

from pydantic import SecretStr

from rollcage.errors import UsageError
from rollcage.types import Proxies, System, Value

KINDS = {"vllm": "VLLM", "openai": "OPENAI", "hf_router": "HF_ROUTER", "local": "ROLLCAGE"}
"""The catalog entries that can be set up by variables, and how the names of those variables begin."""


DOTENV = "ROLLCAGE_DOTENV"
"""`0` here: no `.env` is read."""
ADDRESSES = {
    "VLLM": ("VLLM_URL",),
    **{prefix: (f"{prefix}_BASE_URL",) for prefix in ("OPENAI", "HF_ROUTER", "ROLLCAGE", "FLEET")},
    "E2B": ("E2B_DOMAIN", "E2B_API_URL", "E2B_SANDBOX_URL"),
}
"""Where keys go: the variables of addresses, by how the name of the key's begins."""


class EndpointSettings(Value):
    """What the environment says about one kind of endpoint; empty where it says nothing."""

    base_url: str = ""
    api_key: SecretStr = SecretStr("")
    model: str = ""


class FleetSettings(Value):
    """What the environment says about Fleet; empty where it says nothing."""

    api_key: SecretStr = SecretStr("")
    """`FLEET_API_KEY`."""
    base_url: str = ""
    """`FLEET_BASE_URL`: another control plane than Fleet's own."""


class E2BSettings(Value):
    """What the environment says about E2B's cloud; empty where it says nothing."""

    api_key: SecretStr = SecretStr("")
    """`E2B_API_KEY`."""
    domain: str = ""
    """`E2B_DOMAIN`: a deployment of one's own."""
    api_url: str = ""
    """`E2B_API_URL`: where boxes are ordered, if not at the domain's usual address."""
    sandbox_url: str = ""
    """`E2B_SANDBOX_URL`: where boxes are reached, if not at the domain's usual address."""


class OtlpSettings(Value):
    """Where traces of rollouts go; empty where nowhere. A `.env` sets none of it: its writer would see them."""

    url: str = ""
    """`ROLLCAGE_OTLP`: an OTLP collector, such as http://host:4318."""
    headers: SecretStr = SecretStr("")
    """`OTEL_EXPORTER_OTLP_HEADERS`: sent with them, `name=value,name=value`."""
    content: bool = False
    """`ROLLCAGE_OTLP_CONTENT`: include prompts, answers and outputs in the traces."""


class Settings(Value):
    """Everything rollcage takes from its surroundings."""

    home: Path
    """Where the log, the layers and the boxes live."""
    endpoints: dict[str, EndpointSettings] = {}
    """What the variables say, by catalog entry."""
    fleet: FleetSettings = FleetSettings()
    """Remote environments."""
    engines: tuple[str, ...] = ()
    """Where a container engine may answer, in the order in which they are tried: `DOCKER_HOST`, or the usual places."""
    e2b: E2BSettings = E2BSettings()
    """E2B's cloud."""
    npm_registry: str = ""
    """`NPM_CONFIG_REGISTRY`, or the `registry` of `~/.npmrc`: where agents are fetched from on machines without npm."""
    server_key: SecretStr = SecretStr("")
    """`ROLLCAGE_SERVER_KEY`: a key that may ask everything of the server."""
    answer_limit_mb: int = 64
    """`ROLLCAGE_ANSWER_LIMIT_MB`: how long an answer of a model may be, packed and unpacked; a longer is cut off."""
    keep_work_mb: int = 64
    """`ROLLCAGE_KEEP_WORK_MB`: the agent's work is kept beside the log for `rollcage reverify` where it is not larger
    than this; 0 keeps none."""
    no_color: bool = False
    """`NO_COLOR`: no colours, whatever the terminal can do."""
    system: System | None = None
    """`ROLLCAGE_SYSTEM`: what boxes show that name no system, `host` or `base`; not set: `base` once it was made."""
    proxies: Proxies = Proxies()
    """`HTTPS_PROXY`, `HTTP_PROXY`, `ALL_PROXY`, `NO_PROXY`, in small letters too: on the way to models. A `.env` sets
    none: its writer would see what goes by."""
    replicas: tuple[str, ...] = ()
    """`ROLLCAGE_ENDPOINT_REPLICAS`: addresses of one model that answer alike, with commas between them; or
    `@FILE`, which has one per line and may change. Rollouts that name one of them are spread over all. A `.env` sets
    none of it."""
    otlp: OtlpSettings = OtlpSettings()
    """OpenTelemetry."""
    debug: bool = False
    """`ROLLCAGE_DEBUG`: show where an error came from."""

    @property
    def log_path(self) -> Path:
        """The file that holds every rollout."""
        return self.home / "rollouts.db"

    @property
    def log_writable(self) -> bool:
        """Whether this user may write the log and beside it; on a read-only disk nobody may."""
        return os.access(self.log_path, os.W_OK) and os.access(self.home, os.W_OK)

    @property
    def prices_path(self) -> Path:
        """What models cost: a TOML table by name, each with `input` and `output` per million tokens."""
        return self.home / "prices.toml"

    @property
    def work_dir(self) -> Path:
        """Where agents' work is kept, beside the log."""
        return self.home / "work"

    @property
    def trees_dir(self) -> Path:
        """Where files of tasks are kept, beside the log: each content once."""
        return self.home / "trees"

    @property
    def cache_dir(self) -> Path:
        """Where downloads are kept; all of it can be fetched again."""
        return self.home / "cache"

    def sending_traces(self, url: str | None, content: bool) -> Settings:
        """The same, with traces of rollouts sent as these options say, over what is set."""
        given = {"url": url or self.otlp.url, "content": content or self.otlp.content}
        return self.model_copy(update={"otlp": self.otlp.model_copy(update=given)})

    def with_replicas(self, addresses: tuple[str, ...]) -> Settings:
        """The same, with these addresses of one model in place of what is set, where there are any."""
        return self.model_copy(update={"replicas": addresses}) if addresses else self

    @classmethod
    def from_environ(
        cls, environ: Mapping[str, str] | None = None, *, home: str | None = None, root: bool | None = None
    ) -> Settings:
        """Read the variables: unless given, this process's own, and those of a `.env` in the working directory.

        `home` takes the place of `ROLLCAGE_HOME`; `root` says whether we are the superuser, whose
        state lives in /var/lib.
        """
        own = os.environ if environ is None else environ
        proxies, otlp = _proxies(own), _otlp(own)
        replicas = tuple(each.strip() for each in own.get("ROLLCAGE_ENDPOINT_REPLICAS", "").split(",") if each.strip())
        environ = _beside_file(os.environ) if environ is None else environ
        if home:
            environ = {**environ, "ROLLCAGE_HOME": home}
        return cls(
            home=_home(environ, os.geteuid() == 0 if root is None else root),
            endpoints={kind: _endpoint(environ, kind) for kind in KINDS},
            fleet=FleetSettings(
                api_key=SecretStr(environ.get("FLEET_API_KEY", "").strip()),
                base_url=environ.get("FLEET_BASE_URL", "").strip(),
            ),
            engines=_engines(environ),
            e2b=_e2b(environ),
            npm_registry=_npm_registry(environ),
            server_key=SecretStr(environ.get("ROLLCAGE_SERVER_KEY", "").strip()),
            answer_limit_mb=_megabytes(environ, "ROLLCAGE_ANSWER_LIMIT_MB", 64),
            keep_work_mb=_megabytes(environ, "ROLLCAGE_KEEP_WORK_MB", 64, least=0),
            no_color=bool(environ.get("NO_COLOR")),
            system=_system(environ),
            proxies=proxies,
            replicas=replicas,
            otlp=otlp,
            debug=_on(environ, "ROLLCAGE_DEBUG"),
        )


def give_default(name: str, value: str) -> None:
    """Set what libraries of others read when they are loaded, unless somebody has set it."""
    os.environ.setdefault(name, value)


def ray_is_encrypted() -> bool:
    """Whether this process's Ray encrypts what it sends to other machines."""
    return _on(os.environ, "RAY_USE_TLS")


def _on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() not in ("", "0", "false", "no")


def _otlp(environ: Mapping[str, str]) -> OtlpSettings:
    return OtlpSettings(
        url=environ.get("ROLLCAGE_OTLP", "").strip(),
        headers=SecretStr(environ.get("OTEL_EXPORTER_OTLP_HEADERS", "").strip()),
        content=_on(environ, "ROLLCAGE_OTLP_CONTENT"),
    )


def _proxies(environ: Mapping[str, str]) -> Proxies:
    def said(name: str) -> str:
        return (environ.get(name) or environ.get(name.lower()) or "").strip()

    every = said("ALL_PROXY")
    rules = tuple(rule.strip() for rule in said("NO_PROXY").split(",") if rule.strip())
    return Proxies(https=said("HTTPS_PROXY") or every, http=said("HTTP_PROXY") or every, none_for=rules)


def _beside_file(environ: Mapping[str, str]) -> Mapping[str, str]:
    """What is set, and beside it what a `.env` here says. `ROLLCAGE_DOTENV=0` leaves the file alone.

    An address of the file is not used with a key that is set: whoever wrote the file would get the key.
    """
    if environ.get(DOTENV, "").strip().lower() in ("0", "false", "no", "off"):
        return environ
    said = _lines(Path(".env"))
    for prefix, addresses in ADDRESSES.items():
        if environ.get(f"{prefix}_API_KEY", "").strip():
            said = {name: value for name, value in said.items() if name not in addresses}
    return {**said, **environ}


def _lines(file: Path) -> dict[str, str]:
    """The variables of such a file; a line that sets none is passed over, as is a file that cannot be read."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.strip().removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if separator and name.isidentifier():
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            found[name] = value[1:-1] if quoted else value
    return found


def variable(kind: str, field: str) -> str:
    """The name of the variable that sets `field` (`base_url`, `api_key`, `model`) of a catalog entry."""
    if (kind, field) == ("vllm", "base_url"):
        return "VLLM_URL"
    return f"{KINDS[kind]}_{field.upper()}"


def _endpoint(environ: Mapping[str, str], kind: str) -> EndpointSettings:
    values = {field: environ.get(variable(kind, field), "").strip() for field in ("base_url", "api_key", "model")}
    return EndpointSettings(base_url=values["base_url"], api_key=SecretStr(values["api_key"]), model=values["model"])


def _engines(environ: Mapping[str, str]) -> tuple[str, ...]:
    named = environ.get("DOCKER_HOST", "").strip() or environ.get("CONTAINER_HOST", "").strip()
    if named:
        return (named,)
    own = environ.get("XDG_RUNTIME_DIR", "").strip()
    # Rootless engines first: what breaks out of their boxes is an ordinary user.
    rootless = (f"{own}/podman/podman.sock", f"{own}/docker.sock") if own.startswith("/") else ()
    return tuple(f"unix://{path}" for path in (*rootless, "/run/podman/podman.sock", "/var/run/docker.sock"))


def _e2b(environ: Mapping[str, str]) -> E2BSettings:
    return E2BSettings.model_validate(
        {field: environ.get(f"E2B_{field.upper()}", "").strip() for field in E2BSettings.model_fields}
    )


def _npm_registry(environ: Mapping[str, str]) -> str:
    for name in ("NPM_CONFIG_REGISTRY", "npm_config_registry"):
        if named := environ.get(name, "").strip():
            return named
    file = Path(environ.get("NPM_CONFIG_USERCONFIG", "").strip() or Path(environ.get("HOME", "").strip()) / ".npmrc")
    try:
        lines = file.read_text(encoding="utf-8").splitlines() if file.is_absolute() else []
    except (OSError, ValueError):
        return ""
    pairs = [(key.strip(), value.strip().strip("\"'")) for key, _, value in (line.partition("=") for line in lines)]
    return next((value for key, value in pairs if key == "registry"), "")


def _megabytes(environ: Mapping[str, str], name: str, default: int, *, least: int = 1) -> int:
    given = environ.get(name, "").strip() or str(default)
    if not given.isdecimal() or not least <= int(given) <= 1 << 20:
        raise UsageError(f"{name}: {given!r} is no number of megabytes", remedy=f"set it to such as {default}")
    return int(given)


def _system(environ: Mapping[str, str]) -> System | None:
    named = environ.get("ROLLCAGE_SYSTEM", "").strip()
    for known in get_args(System):
        if named == known:
            return cast("System", known)
    if named:
        raise UsageError(f"ROLLCAGE_SYSTEM: {named!r} is no system of boxes", remedy="set it to host or to base")
    return None


def _home(environ: Mapping[str, str], root: bool) -> Path:
    named = environ.get("ROLLCAGE_HOME", "").strip()
    if named:
        return Path(named).absolute()
    if root:
        return Path("/var/lib/rollcage")
    state = environ.get("XDG_STATE_HOME", "").strip()
    # The XDG rules say that a relative path there is to be ignored.
    if state.startswith("/"):
        return Path(state) / "rollcage"
    home = environ.get("HOME", "").strip()
    if not home.startswith("/"):
        raise UsageError(
            "no place for the log: HOME is not set", remedy="set ROLLCAGE_HOME to a folder you may write to"
        )
    return Path(home) / ".local" / "state" / "rollcage"
