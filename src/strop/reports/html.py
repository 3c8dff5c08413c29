"""Templates -> pages. What comes from a rollout or a recipe is not trusted: everything is escaped, except drawings of ours."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from strop.reports.plots import STYLE, THEME, Plot, draw
from strop.reports.scales import Unit, figure


def render(template: str, values: Mapping[str, object]) -> str:
    """The page that `template`, a file of reports/templates, makes of `values`: one file that needs no other."""
    return _ENVIRONMENT.get_template(template).render(values)


def _draw(plot: Plot) -> Markup:
    return draw(plot)


def _percent(value: float) -> str:
    return figure(value, Unit.PERCENT)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("strop.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"draw": _draw, "figure": figure, "percent": _percent}
    environment.globals |= {"theme": Markup(THEME), "plot_style": Markup(STYLE)}
    return environment


_ENVIRONMENT = _environment()
