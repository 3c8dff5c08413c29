import pytest

from strop.reports.html import render
from strop.reports.number_format import Table
from strop.reports.plots import compare_plots, draw, drawings_of


def test_an_arm_is_the_mean_of_its_seeds_and_their_range():
    curves = {"reward": {"grpo": [[(1, 0.0), (2, 0.4)], [(1, 1.0), (2, 0.6)]]}}
    (series,) = compare_plots(curves)["reward"].series
    assert series.points == ((1, 0.5), (2, 0.5))
    assert series.band == ((1, 0.0, 1.0), (2, 0.4, 0.6))
    assert series.label == "grpo (2 seeds)"


def test_the_mean_ends_where_a_seed_ends():
    curves = {"reward": {"grpo": [[(1, 0.0), (2, 0.4), (3, 9.0)], [(1, 1.0), (2, 0.6)]]}}
    (series,) = compare_plots(curves)["reward"].series
    assert [x for x, _ in series.points] == [1, 2]


def test_an_arm_keeps_its_colour_and_is_named_where_it_has_no_curve():
    curves = {"reward": {"grpo": [[(1, 0.0)]], "arpo": [[(1, 1.0)]]}, "entropy": {"arpo": [[(1, 1.0)]]}}
    plots = compare_plots(curves)
    assert plots["reward"].series[1].colour == plots["entropy"].series[0].colour == 1
    assert plots["entropy"].missing == ("entropy of grpo",)
    assert "missing: entropy of grpo" in draw(plots["entropy"], is_standalone=True)


def test_seeds_without_a_common_x_are_an_error_that_names_the_arm():
    with pytest.raises(ValueError, match="arm 'grpo'"):
        compare_plots({"reward": {"grpo": [[(1, 0.0)], [(2, 0.0)]]}})


def test_the_page_holds_the_figures_and_escapes_them():
    table = Table(columns=("arm", "accuracy"), rows=(("grpo <script>", "84.2%"),))
    drawings = drawings_of({"reward": {"grpo": [[(1, 0.0), (2, 1.0)]]}})
    page = render("compare.html.j2", title="Arms", figures=table, lead="One seed each.", drawings=drawings)
    assert "84.2%" in page
    assert "grpo &lt;script&gt;" in page
    assert "One seed each." in page
    assert page.count("<svg") == 1
