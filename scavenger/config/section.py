"""What every section of a configuration is: strict, frozen, blanks cut off, numbers finite; and what keys are made of."""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator


@dataclass(frozen=True, slots=True)
class Allowed:
    """What docs/config.md gives as allowed for a key whose type alone does not tell. It checks nothing."""

    text: str


Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$"),
    Allowed("letters, digits, `_`, `.`, `-`; 1 to 64, the first a letter or digit"),
]
Host = Annotated[str, Allowed("host name or IPv4 address")]


class Mistaken(ValueError):
    """About one key of a section, which the message names."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _of_their_types(cls, given: Any) -> Any:
        """Refuses what pydantic would convert: text for a number or a boolean, and each of these for the other ("false" would be true)."""
        for key, value in given.items() if isinstance(given, dict) else ():
            field = cls.model_fields.get(key)
            if field is not None and (wrong := _mistaken(field.annotation, value)):
                raise Mistaken(f"{key} = {value!r}: {wrong}")
        return given


def _mistaken(annotation: Any, value: Any) -> str:
    """What is wrong with a plain value for a field of numbers or booleans alone; "" where nothing is, or where it takes others too."""
    kinds = set(get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)) - {
        NoneType
    }
    if not kinds <= {int, float, bool}:
        return ""
    wanted = "true or false" if kinds == {bool} else "a number"
    if isinstance(value, str):
        quoted = value in ("true", "false") if kinds == {bool} else _is_number(value)
        return f"text where {wanted} is wanted" + ("; write it without quotes" if quoted else "")
    if isinstance(value, bool) and bool not in kinds:
        return "a boolean where a number is wanted"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return "a number where true or false is wanted" if is_number and kinds == {bool} else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
