"""What of a changed configuration a running daemon takes over, and what waits for a restart.

Knows configurations only: which keys may change is said in config.py.
"""

from __future__ import annotations

from skippy_sched.config import RELOADABLE, Config, Section


def merged(running: Config, wanted: Config) -> tuple[Config, list[str], list[str]]:
    """The configuration to go on with, the keys changed in it, and those that cannot change.

    Keys are named ``section.key``, in the order of the reference.
    """
    changed: list[str] = []
    refused: list[str] = []
    sections: dict[str, Section] = {}
    for name in Config.model_fields:
        before: Section = getattr(running, name)
        after: Section = getattr(wanted, name)
        taken: dict[str, object] = {}
        for key, info in type(before).model_fields.items():
            value = getattr(after, key)
            if value == getattr(before, key):
                continue
            if info.json_schema_extra == RELOADABLE and not _turns_tls(before, after, key):
                taken[key] = value
                changed.append(f"{name}.{key}")
            else:
                refused.append(f"{name}.{key}")
        sections[name] = before.model_copy(update=taken)
    return running.model_copy(update=sections), changed, refused


def _turns_tls(before: Section, after: Section, key: str) -> bool:
    """On or off: the socket that listens is one or the other. Another certificate is no matter."""
    return key in ("tls_cert", "tls_key") and None in (getattr(before, key), getattr(after, key))
