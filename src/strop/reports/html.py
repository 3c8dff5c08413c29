"""Templates -> pages. What comes from a rollout or a recipe is not trusted: everything is escaped, except drawings of ours."""

from __future__ import annotations

from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from strop.reports.number_format import Unit, duration, figure

_ENVIRONMENT = Environment(
    loader=PackageLoader("strop.reports"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def render(template: str, **values: object) -> Markup:
    """The page or drawing that `template`, a file of reports/templates, makes of `values`: one file that needs no other."""
    return Markup(_ENVIRONMENT.get_template(template).render(values))


def number(value: float) -> str:
    """A coordinate of a drawing."""
    return f"{value:.1f}".removesuffix(".0")


_PERCENT = partial(figure, unit=Unit.PERCENT)
_ENVIRONMENT.filters |= {"duration": duration, "figure": figure, "number": number, "percent": _PERCENT}
