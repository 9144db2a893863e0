"""Check the Dockerfile and the compose file: pinned bases, no root, no secret, no network access.

The checks read text, because these suites run where no container can be built. Each returns a
sentence for a finding. hadolint finds nothing in the Dockerfile either (docs/container.md).
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_PINNED = re.compile(r"(@sha256:[0-9a-f]{64}|:v?\d+\.\d+\.\d+[\w.-]*)$")
_SECRET = re.compile(
    r"(?i)(hf_[a-z0-9]{20,}|sk-[a-z0-9]{20,}|-----BEGIN|[a-z_]*(token|password|secret|api_?key)"
    r"[a-z_]*\s*[=:]\s*[\"']?[a-z0-9+][a-z0-9+/_-]{7,})"
)
_FETCH = re.compile(r"(?<![\w.-])(curl|wget|git clone)(?![\w-])|https?://(?!127\.0\.0\.1)")
_FLOATING = re.compile(r"pip install(?!.*--(requirement|constraint))")
KNOWN = frozenset(
    {
        "image", "build", "command", "user", "read_only", "cap_drop", "security_opt", "tmpfs",
        "shm_size", "ulimits", "volumes", "secrets", "ports", "restart", "stop_grace_period",
        "deploy", "healthcheck", "environment",
    }
)  # fmt: skip


def instructions(text: str) -> list[tuple[str, str]]:
    """A Dockerfile's instructions, lines joined, without comments."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\s*\n\s*", " ", plain)
    pairs = (line.strip().partition(" ") for line in joined.splitlines() if line.strip())
    return [(word.upper(), rest.strip()) for word, _, rest in pairs]


def of_dockerfile(text: str) -> Iterator[str]:
    """Return the findings in a Dockerfile."""
    found = instructions(text)
    arguments = dict(rest.split("=", 1) for word, rest in found if word == "ARG" and "=" in rest)
    stages = [rest for word, rest in found if word == "FROM"]
    names = [rest.split()[-1] for rest in stages if " AS " in rest.upper()]
    if len(stages) < 2:
        yield "one stage: what builds is shipped"
    for rest in stages:
        base = rest.split()[0]
        base = arguments.get(base.strip("${}"), base)
        if base not in names and not _PINNED.search(base):
            yield f"base {base}: no digest and no exact version"
    users = [rest for word, rest in found if word == "USER"]
    if not users or not re.fullmatch(r"[1-9]\d*(:[1-9]\d*)?", users[-1]):
        yield f"user {users[-1] if users else 'root'}: a number that is not 0 is expected"
    if any(word in {"ENTRYPOINT", "CMD"} and not rest.startswith("[") for word, rest in found):
        yield "ENTRYPOINT or CMD in a shell: signals would not arrive"
    for needed in ("ENTRYPOINT", "HEALTHCHECK"):
        if needed not in {word for word, _ in found}:
            yield f"no {needed}"
    for word, rest in found:
        if word == "ADD":
            yield f"ADD {rest}: COPY says what comes from where"
        if word == "RUN" and _FETCH.search(rest):
            yield f"RUN fetches something that is not pinned: {rest[:60]}"
        if word == "RUN" and _FLOATING.search(rest):
            yield f"RUN installs versions that float: {rest[:60]}"
        if word in {"ARG", "ENV"} and re.search(r"(?i)token|password|secret|api_?key", rest):
            yield f"{word} {rest.split('=')[0]}: a secret stays in every layer"
    yield from of_any(text)


def of_any(text: str) -> Iterator[str]:
    """Secrets in a file of any kind."""
    for line in text.splitlines():
        if _SECRET.search(line) and "/run/secrets/" not in line and "${" not in line:
            yield f"something like a secret: {line.strip()[:20]}..."


def of_compose(document: Any, text: str) -> Iterator[str]:
    """Return the findings in a compose file."""
    services = document.get("services") if isinstance(document, dict) else None
    if not isinstance(services, dict) or not services:
        yield "no services"
        return
    if strange := sorted(document.keys() - {"services", "secrets", "volumes", "networks"}):
        yield f"unknown key {strange[0]}"
    for name, service in services.items():
        yield from (f"{name}: {each}" for each in _of_service(service))
        for secret in service.get("secrets", []):
            if secret not in document.get("secrets", {}):
                yield f"{name}: secret {secret} is nowhere"
    for secret in document.get("secrets", {}).values():
        if not str(secret.get("file", "")).startswith("${"):
            yield "a secret whose file is not the operator's to name"
    yield from of_any(text)


def _of_service(service: dict[str, Any]) -> Iterator[str]:
    if strange := sorted(service.keys() - KNOWN):
        yield f"unknown key {strange[0]}"
    if not _PINNED.search(str(service.get("image", ""))):
        yield f"image {service.get('image')}: no exact version"
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", str(service.get("user", ""))):
        yield "it runs as root"
    if service.get("read_only") is not True or service.get("cap_drop") != ["ALL"]:
        yield "it may write to its image, or has capabilities"
    for port in service.get("ports", []):
        if not str(port).startswith("127.0.0.1:"):
            yield f"port {port}: open beyond this machine"
    for volume in service.get("volumes", []):
        if not str(volume).endswith(":ro") or ":?" not in str(volume):
            yield f"volume {volume}: not read-only, or not the operator's to name"
    command = [str(each) for each in service.get("command", [])]
    if "--tensor-parallel-size" in command:
        ranks = command[command.index("--tensor-parallel-size") + 1]
        reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {})
        counts = {str(each.get("count")) for each in reserved.get("devices", [])}
        if counts != {ranks}:
            yield f"{ranks} ranks on {', '.join(sorted(counts)) or 'no'} GPUs"


def entry(text: str) -> list[str]:
    """Return the command that a Dockerfile starts."""
    found = [rest for word, rest in instructions(text) if word == "ENTRYPOINT"]
    made: list[str] = json.loads(found[-1])
    return made


def copied(text: str) -> list[str]:
    """Return the paths that a Dockerfile copies from the repository."""
    lines = [rest.split() for word, rest in instructions(text) if word == "COPY"]
    return [word for words in lines if "--from" not in words[0] for word in words[:-1]]
