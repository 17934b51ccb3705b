"""How sure one can be of each field of a config: its tier, which stands in the field's metadata.

- "core": a recipe in configs/ sets it, and runs with it were measured (docs/results.md, docs/benchmarks.md).
- "verified": it ran on a card, and its effect is known.
- "experimental": it works, as tests show, but its effect was not measured.

A field that only says where something is, what is written or how long a run is has no effect to measure: it is core if a
recipe sets it, else verified. CONTRIBUTING.md says how a field becomes core.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from qerl_jax.system.checked import sections

type Tier = Literal["core", "verified", "experimental"]


def core(default: Any = dataclasses.MISSING, experimental: Sequence[str] = ()) -> Any:
    """A field that a recipe sets and that was measured, but for those of its values that are `experimental`."""
    metadata = {"tier": "core", "experimental": tuple(experimental)}
    return dataclasses.field(default=default, metadata=metadata)


def verified(default: Any = dataclasses.MISSING) -> Any:
    """A field that ran on a card and whose effect is known."""
    return dataclasses.field(default=default, metadata={"tier": "verified"})


def experimental(default: Any = dataclasses.MISSING) -> Any:
    """A field that works, and whose effect was not measured."""
    return dataclasses.field(default=default, metadata={"tier": "experimental"})


def tier_text(field: dataclasses.Field) -> str:
    """Returns the tier of a field in words, with the values whose own tier is lower."""
    values = field.metadata.get("experimental")
    listed = ", ".join(f'"{value}"' for value in values or ())
    return field.metadata["tier"] + (f"; experimental: {listed}" if values else "")


def about_tiers(cfg: Any) -> list[str]:
    """Returns a line that names the fields that a config sets away from their defaults and that are not core, if any.

    Args:
        cfg: A `config.RunConfig`.
    """
    parts = []
    for tier, note in (("experimental", " (effect not measured)"), ("verified", "")):
        if names := [name for name, field_tier in _changed(cfg) if field_tier == tier]:
            parts.append(f"{tier}{note}: {', '.join(names)}")
    about = f"fields beyond the core (docs/configuration.md#tiers): {'; '.join(parts)}"
    return [about] if parts else []


def _changed(cfg: Any, prefix: str = "") -> Iterator[tuple[str, Tier]]:
    """Yields the fields that differ from their defaults, as "name = value", with their tiers.

    A section that is absent by default is named itself if it is there with its own defaults, unless it has core fields.
    """
    inner = sections(cfg.__class__)
    for field in dataclasses.fields(cfg):
        name, value = prefix + field.name, getattr(cfg, field.name)
        if field.name not in inner:
            if value != field.default:
                is_lower = value in field.metadata.get("experimental", ())
                tier: Tier = "experimental" if is_lower else field.metadata["tier"]
                yield f"{name} = {value!r}", tier
        elif value is not None:
            within = list(_changed(value, f"{name}."))
            tiers = [leaf.metadata.get("tier") for leaf in dataclasses.fields(value)]
            if not within and field.default is None and "core" not in tiers:
                yield name, "verified" if "verified" in tiers else "experimental"
            yield from within
