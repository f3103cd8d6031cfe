"""The setting `lora`, as in r=16,alpha=32,targets=q_proj+v_proj. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from rung.errors import ConfigError, nearest

_KEYS = ("r", "alpha", "targets", "dropout", "base")
_MOST = 2**16  # of a rank


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters: B A alpha / r is added to the weight of each of the layers."""

    r: int
    alpha: float
    targets: tuple[str, ...] = ()  # names or patterns; without any, all linear layers of the blocks
    dropout: float = 0.0
    base: str | None = None  # the type in which frozen linear layers are kept; as the task makes them without one

    @property
    def scale(self) -> float:
        return self.alpha / self.r


def parse_lora(text: str) -> Lora:
    found: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in _KEYS or not equals or not value:
            raise ConfigError(
                f"lora: {part.strip()!r} is none of {', '.join(f'{key}=' for key in _KEYS)}.{nearest(key, _KEYS)} It "
                "is written as r=16,alpha=32,targets=q_proj+v_proj."
            )
        if key in found:
            raise ConfigError(f"lora: {key} is given twice.")
        found[key] = value
    r, alpha, dropout = (_number(found, key) for key in ("r", "alpha", "dropout"))
    if r is None or r != int(r) or not 1 <= r < _MOST:
        raise ConfigError(
            f"lora: r is a whole number from 1 on, the rank of the adapters, as in r=16, not {found.get('r')!r}."
        )
    if alpha is not None and not alpha > 0:
        raise ConfigError(f"lora: alpha must be above 0, not {found['alpha']}.")
    if dropout is not None and not 0 <= dropout < 1:
        raise ConfigError(f"lora: dropout must be at least 0 and below 1, not {found['dropout']}.")
    if found.get("base", "bf16") != "bf16":
        raise ConfigError(
            f"lora: base is bf16, or left out: then the base is kept as ever. It cannot be {found['base']!r}."
        )
    targets = tuple(word.strip() for word in found.get("targets", "").split("+") if word.strip())
    return Lora(int(r), alpha if alpha is not None else r, targets, dropout or 0.0, found.get("base"))


def _number(found: dict[str, str], key: str) -> float | None:
    try:
        return float(found[key]) if key in found else None
    except ValueError:
        raise ConfigError(f"lora: {key} is a number, not {found[key]!r}.") from None
